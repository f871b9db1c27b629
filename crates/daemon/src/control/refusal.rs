//! The answer to a request that is not done.
//!
//! Promises: each one has a class, a text and an exit code for the client, so a client never has to
//! read the text to decide. Plain values.

use crate::failure::{Exit, Failure};

/// Why a request is not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// QMP's class.
    pub class: &'static str,
    /// Why it was not done.
    pub text: String,
    /// What the user can do.
    pub hint: Option<String>,
    /// The exit code for the client.
    pub exit: u8,
}

impl Refusal {
    /// What was said makes no sense.
    pub fn usage(text: impl Into<String>) -> Refusal {
        Refusal { class: "GenericError", text: text.into(), hint: None, exit: Exit::Usage.code() }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal {
            class: "GenericError",
            text: failure.message().to_owned(),
            hint: failure.hint_text().map(str::to_owned),
            exit: failure.code(),
        }
    }
}
