//! The error of entering a sandbox.
//!
//! Promises: its text names the part that is missing and the reason.

use std::fmt;

/// Why a process is not confined: a required part is missing, or a thread could not be confined.
#[derive(Debug)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}
