//! What helps when the user or the sandbox of a serving process is in the way of a command.
//!
//! Promises: pure.

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
        let is_ours =
            failure.exit == Exit::Permission && !failure.message().contains("--allow-path");
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
        let file = file.map_or_else(|| String::from("FILE"), shell_word);
        failure.hint(format!(
            "the server is in a sandbox, and may not open this file since no image of the disk \
             named it at the start: serve the disk with --allow-path {file}, or with --sandbox off"
        ))
    }
}
