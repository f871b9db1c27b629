//! Where keys and certificates are.
//!
//! Promises: a file is read once, whole, and at most [`FILE_BYTES_MAX`] bytes of it; errors name
//! the file. Control path; blocks for the reads.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest file of keys or certificates, bytes: a bundle of a system's authorities has 250 KB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Why keys or certificates cannot be used: a text for people that names the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError(pub(crate) String);

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SourceError {}

pub(crate) fn wrong<T>(text: impl Into<String>) -> Result<T, SourceError> {
    Err(SourceError(text.into()))
}

/// Where the PEM files of one side are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A directory in QEMU's layout: `ca-cert.pem`, `ca-crl.pem`, and `server-cert.pem` with
    /// `server-key.pem`, or `client-cert.pem` with `client-key.pem`.
    Directory(PathBuf),
    /// Each file by itself. `/dev/fd/N` names a descriptor that the process was started with.
    Files {
        /// Certificates of authorities whose signature makes a peer trusted.
        ca: Option<PathBuf>,
        /// List of certificates that were revoked.
        crl: Option<PathBuf>,
        /// This side's certificate, with those that lead to its authority behind it.
        cert: Option<PathBuf>,
        /// The key of that certificate.
        key: Option<PathBuf>,
    },
}

/// The side of the connection that needs the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Server,
    Client,
}

/// One file that was read.
#[derive(Debug)]
pub(crate) struct PemFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

/// The files that are there.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) ca: Option<PemFile>,
    pub(crate) crl: Option<PemFile>,
    pub(crate) cert: Option<PemFile>,
    pub(crate) key: Option<PemFile>,
}

impl Source {
    /// Understands the words of a command line: a directory, or `ca=FILE,crl=FILE,cert=FILE,
    /// key=FILE`, where `fd:N` as FILE is a descriptor.
    ///
    /// Errors: a text for people.
    pub fn parse(text: &str) -> Result<Source, String> {
        const KEYS: [&str; 4] = ["ca", "crl", "cert", "key"];
        let is_list = text.split_once('=').is_some_and(|(key, _)| KEYS.contains(&key));
        if text.is_empty() {
            return Err(String::from("the directory has no name"));
        }
        if !is_list {
            return Ok(Source::Directory(text.into()));
        }
        let mut found: [Option<PathBuf>; 4] = Default::default();
        for pair in text.split(',') {
            let named = pair.split_once('=');
            let place = named.and_then(|(key, _)| KEYS.iter().position(|known| *known == key));
            let (Some((_, file)), Some(place)) = (named, place) else {
                return Err(format!("'{pair}' is none of ca=FILE, crl=FILE, cert=FILE, key=FILE"));
            };
            let path = match file.strip_prefix("fd:") {
                Some(number) if number.parse::<u16>().is_ok() => format!("/dev/fd/{number}"),
                Some(number) => return Err(format!("'{number}' is no number of a descriptor")),
                None if file.is_empty() => return Err(format!("'{pair}' names no file")),
                None => file.to_owned(),
            };
            if found[place].replace(path.into()).is_some() {
                return Err(format!("{}= is given twice", KEYS[place]));
            }
        }
        let [ca, crl, cert, key] = found;
        Ok(Source::Files { ca, crl, cert, key })
    }

    /// Whether one of the files is a descriptor of the process, which may be read once only.
    pub fn has_descriptor(&self) -> bool {
        let Source::Files { ca, crl, cert, key } = self else { return false };
        [ca, crl, cert, key].into_iter().flatten().any(|path| path.starts_with("/dev/fd"))
    }

    /// Reads the files of a side. Of a directory those that are missing are left out.
    ///
    /// Errors: a file that cannot be read; one that was named and is not there.
    pub(crate) fn read(&self, side: Side) -> Result<Files, SourceError> {
        match self {
            Source::Directory(directory) => {
                let optional = |name: &str| match read(&directory.join(name)) {
                    Err((_, error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err((path, error)) => Err(cannot(&path, &error)),
                    Ok(file) => Ok(Some(file)),
                };
                let own = match side {
                    Side::Server => ["server-cert.pem", "server-key.pem"],
                    Side::Client => ["client-cert.pem", "client-key.pem"],
                };
                Ok(Files {
                    ca: optional("ca-cert.pem")?,
                    crl: optional("ca-crl.pem")?,
                    cert: optional(own[0])?,
                    key: optional(own[1])?,
                })
            }
            Source::Files { ca, crl, cert, key } => {
                let named = |path: &Option<PathBuf>| {
                    let read = path.as_deref().map(read).transpose();
                    read.map_err(|(path, error)| cannot(&path, &error))
                };
                Ok(Files { ca: named(ca)?, crl: named(crl)?, cert: named(cert)?, key: named(key)? })
            }
        }
    }

    /// A file of this source as the user knows it, for a message that says that it is missing.
    pub(crate) fn display_name(&self, in_directory: &str, word: &str) -> String {
        match self {
            Source::Directory(directory) => directory.join(in_directory).display().to_string(),
            Source::Files { .. } => format!("{word}=FILE"),
        }
    }
}

fn read(path: &Path) -> Result<PemFile, (PathBuf, std::io::Error)> {
    let mut bytes = Vec::new();
    let result = std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    match result {
        Ok(count) if count as u64 > FILE_BYTES_MAX => {
            let error = std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it is too large");
            Err((path.to_owned(), error))
        }
        Ok(_) => Ok(PemFile { path: path.to_owned(), bytes }),
        Err(error) => Err((path.to_owned(), error)),
    }
}

/// In the words of QEMU.
fn cannot(path: &Path, error: &std::io::Error) -> SourceError {
    let text = error.to_string();
    // Without the number of the error.
    let words = text.split(" (os error").next().unwrap_or_default();
    SourceError(format!("Unable to access credentials {}: {words}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_a_directory_or_files_and_descriptors() {
        assert_eq!(Source::parse("/etc/pki"), Ok(Source::Directory("/etc/pki".into())));
        assert_eq!(Source::parse("a=b"), Ok(Source::Directory("a=b".into())));
        let expected = Source::Files {
            ca: Some("a.pem".into()),
            crl: None,
            cert: Some("/dev/fd/3".into()),
            key: Some("/dev/fd/4".into()),
        };
        assert_eq!(Source::parse("cert=fd:3,key=fd:4,ca=a.pem"), Ok(expected));
        for wrong in ["", "cert=", "cert=a,cert=b", "cert=a,x=b", "key=fd:x", "key=fd:-1"] {
            assert!(Source::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let source = Source::parse("ca=/nowhere/ca.pem").expect("words");
        let error = source.read(Side::Client).expect_err("not there").to_string();
        let expected = "Unable to access credentials /nowhere/ca.pem: No such file or directory";
        assert_eq!(error, expected);
    }
}
