//! What helps when the user or the sandbox of a serving process is in the way of a command.
//!
//! Promises: pure.

use std::path::Path;

use ringdisk_disk::Cause;
use ringdisk_disk::name::FileName;

use crate::failure::{Exit, Failure};
use crate::terminal::shell_word;

/// Whom the process has become, and what it is confined to.
#[derive(Clone, Debug, Default)]
pub(in crate::control) struct Advice {
    /// The user, if it has become one.
    pub(super) user: Option<String>,
    /// The sandbox, if it is in one.
    pub(super) sandbox: Option<String>,
}

impl Advice {
    /// Adds what helps: the kernel says the same of the user and of the sandbox.
    ///
    /// * `file`: what the command names, if it names a file.
    pub(in crate::control) fn explain(&self, failure: Failure, file: Option<&str>) -> Failure {
        let is_ours = failure.exit == Exit::Permission
            && failure.image_cause() != Some(&Cause::PathNotAllowed);
        if let Some(user) = self.user.as_ref().filter(|_| failure.exit == Exit::Permission) {
            return failure.hint(format!(
                "the process serves as user {user}, who may not do this, or in a sandbox without \
                 it: let that user, \
                 or serve the image with --user root; a directory other than the image's needs \
                 --allow-path, too"
            ));
        }
        if !is_ours || self.sandbox.is_none() {
            return failure;
        }
        if let Some(directory) = file.and_then(certificates_of) {
            return failure.hint(format!(
                "the server is in a sandbox, and reads no certificates that it was not given at \
                 the start, also where a user names them: serve the disk with --allow-path {}, or \
                 with --sandbox off",
                shell_word(&directory)
            ));
        }
        let file = file.map_or_else(|| String::from("FILE"), shell_word);
        failure.hint(format!(
            "the server is in a sandbox, and may not open this file since no image of the disk \
             named it at the start: serve the disk with --allow-path {file}, or with --sandbox off"
        ))
    }
}

/// The directory of the certificates of an `nbds` address.
fn certificates_of(target: &str) -> Option<String> {
    let name = FileName::export_of(Path::new(target)).ok()??;
    Some(name.nbd?.tls?.certificates.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_with_certificates_is_told_from_a_file() {
        let sandbox = Some(String::from("full"));
        let advice = Advice { user: None, sandbox };
        let told = |file: &str| {
            let failure = Failure::new(Exit::Permission, "Permission denied");
            advice.explain(failure, Some(file)).hint_text().unwrap_or_default().to_owned()
        };
        let hint = told("nbds://10.0.0.2/?tls-certificates=/etc/pki/ringdisk");
        assert!(hint.contains("reads no certificates"), "{hint}");
        assert!(hint.contains("--allow-path /etc/pki/ringdisk,"), "{hint}");
        let hint = told("/srv/copy.qcow2");
        assert!(hint.contains("may not open this file"), "{hint}");
        assert!(hint.contains("--allow-path /srv/copy.qcow2,"), "{hint}");
        let failure = Failure::new(Exit::Permission, "outside the allowed paths");
        let failure = failure.because(crate::failure::Cause::Image(Cause::PathNotAllowed));
        assert_eq!(advice.explain(failure, None).hint_text(), None, "its text says it already");
    }
}
