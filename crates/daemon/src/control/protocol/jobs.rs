//! Arguments of the commands that begin and control jobs.
//!
//! Promises: pure; any JSON becomes a command or an error that says why not.

use ringdisk_disk::OnError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::control::refusal::Refusal;

/// Longest name of a job, bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// How a job is run.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Terms {
    /// Its name; `None`: one is made of its kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The answer comes at once, and the job goes on when the client has left. Then the client
    /// sends both ends of its word ([`crate::helper::approval`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub background: bool,
    /// Speed limit, bytes per second; 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub speed: u64,
    /// What an error of the image that is written does: a word of [`ON_ERROR`]. `None`: a full
    /// storage pauses a job in the background, other errors end it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_error: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde asks.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What an error of the storage that is written does to a job, by its words.
pub const ON_ERROR: [(&str, OnError); 4] = [
    ("report", OnError::Report),
    ("stop", OnError::Stop),
    ("enospc", OnError::StopWhenFull),
    ("ignore", OnError::Ignore),
];

impl Terms {
    /// What an error does.
    ///
    /// Errors: it is none of the words.
    pub fn on_error(&self) -> Result<OnError, String> {
        let Some(word) = &self.on_error else {
            return Ok(if self.background { OnError::StopWhenFull } else { OnError::Report });
        };
        let found = ON_ERROR.iter().find(|(known, _)| known == word);
        found.map(|(_, on_error)| *on_error).ok_or_else(|| {
            format!(
                "no such word of on-error: '{}'; known: report, stop, enospc, ignore",
                word.escape_debug()
            )
        })
    }
}

/// Whether a name may be given to a job: letters, digits, `-`, `_` and `.`, the first one a letter
/// or digit.
///
/// Errors: why not.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    match name.chars().next() {
        Some(first)
            if first.is_ascii_alphanumeric()
                && name.len() <= NAME_BYTES_MAX
                && name.chars().all(is_plain) =>
        {
            Ok(())
        }
        _ => Err(format!(
            "'{}' cannot be the name of a job: letters, digits, '-', '_' and '.', at most \
             {NAME_BYTES_MAX}, a letter or digit first",
            name.escape_debug()
        )),
    }
}

/// Names a job.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Named {
    /// The job.
    pub id: String,
}

/// Arguments of `job-limit`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NewSpeed {
    /// The job.
    pub id: String,
    /// Bytes per second; 0: no limit.
    pub speed: u64,
}

/// What a client asks of the jobs of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobCommand {
    /// All of them.
    List,
    /// One rests.
    Pause(Named),
    /// It goes on.
    Resume(Named),
    /// It may copy so much in a second.
    Limit(NewSpeed),
    /// It is given up; a mirror that is ready leaves its target as a copy.
    Cancel(Named),
    /// A mirror switches over to its target as soon as that is in step.
    Complete(Named),
    /// The answer comes when it has ended, or is a mirror that is ready and not told to end.
    Wait(Named),
}

impl JobCommand {
    /// All names.
    pub const NAMES: &str = "job-list, job-pause, job-resume, job-limit, job-cancel, \
                             job-complete, job-wait";

    /// Its name and arguments.
    pub fn parts(&self) -> (&'static str, Value) {
        match self {
            JobCommand::List => ("job-list", json!({})),
            JobCommand::Pause(named) => ("job-pause", json!(named)),
            JobCommand::Resume(named) => ("job-resume", json!(named)),
            JobCommand::Limit(speed) => ("job-limit", json!(speed)),
            JobCommand::Cancel(named) => ("job-cancel", json!(named)),
            JobCommand::Complete(named) => ("job-complete", json!(named)),
            JobCommand::Wait(named) => ("job-wait", json!(named)),
        }
    }

    /// Reads a command. `None`: it has another name.
    ///
    /// Errors (inside): arguments that it has not.
    pub fn read(name: &str, arguments: &Map<String, Value>) -> Option<Result<JobCommand, Refusal>> {
        fn of<T: for<'a> Deserialize<'a>>(
            name: &str,
            arguments: &Map<String, Value>,
        ) -> Result<T, Refusal> {
            let value = serde_json::from_value(Value::Object(arguments.clone()));
            value.map_err(|error| Refusal::usage(format!("arguments of '{name}': {error}")))
        }
        /// No arguments.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Nothing {}
        Some(match name {
            "job-list" => of::<Nothing>(name, arguments).map(|_| JobCommand::List),
            "job-pause" => of(name, arguments).map(JobCommand::Pause),
            "job-resume" => of(name, arguments).map(JobCommand::Resume),
            "job-limit" => of(name, arguments).map(JobCommand::Limit),
            "job-cancel" => of(name, arguments).map(JobCommand::Cancel),
            "job-complete" => of(name, arguments).map(JobCommand::Complete),
            "job-wait" => of(name, arguments).map(JobCommand::Wait),
            _ => return None,
        })
    }

    /// The job that it names.
    pub fn id(&self) -> Option<&str> {
        match self {
            JobCommand::List => None,
            JobCommand::Limit(speed) => Some(&speed.id),
            JobCommand::Pause(named)
            | JobCommand::Resume(named)
            | JobCommand::Cancel(named)
            | JobCommand::Complete(named)
            | JobCommand::Wait(named) => Some(&named.id),
        }
    }
}
