//! What client and server say: one JSON object on each line, in the shape of QEMU's QMP.
//!
//! ```text
//! server: {"ringdisk": {"version": "0.1.0", "protocol": 1}}
//! client: {"execute": "resize", "arguments": {"size": 1073741824}, "id": 1}
//! any number, after `events`, until the client leaves:
//! server: {"event": "io-error", "number": 7, "time": {…}, "text": "…"}
//! any number, of commands that take long:
//! server: {"id": 1, "progress": {"done": 0, "total": 100}}
//! then one of these two:
//! server: {"id": 1, "return": {"size": 1073741824}}
//! server: {"id": 1, "error": {"class": "GenericError", "desc": "…", "hint": "…", "exit": 1}}
//! at last, to each client that is connected and waits for no other answer:
//! server: {"ended": {"exit": 12, "desc": "…"}}
//! ```
//!
//! Promises: pure; text of a server for people has no control character that a terminal would obey,
//! unless it is part of a result ([`Reply::Done`]), which the client cleans before it prints it;
//! any bytes become a command or an error that says why not. Unknown commands
//! and unknown arguments are errors, never ignored.

pub mod checkpoint;
pub mod jobs;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringdisk_disk::Format;
use ringdisk_disk::name::{FileName, is_export};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::checkpoint::{Begin, Dirty, End};
use self::jobs::{JobCommand, Terms};
pub use crate::control::refusal::Refusal;
use crate::helper::approval::Allows;
use crate::size::SizeChange;
use crate::terminal::visible;

/// Version of what is said here; changes when an older client would misunderstand.
pub const VERSION: u32 = 1;

/// Longest request, bytes: a command with two paths of 4 KiB, escaped at worst six-fold, and room.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Longest reply that a client takes, bytes: counters of 64 queues are 100 KiB.
pub const REPLY_BYTES_MAX: usize = 4 << 20;

/// Arguments of `resize`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Resize {
    /// The size that is asked for.
    pub size: SizeChange,
    #[serde(default)]
    /// The disk may lose its end.
    pub shrink: bool,
    #[serde(default)]
    /// What is prepared in the new part; `None`: nothing.
    pub preallocation: Option<String>,
}

/// Arguments of `snapshot`: exactly one of them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Snapshot {
    /// Absolute path of a new overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Name of a snapshot inside the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal: Option<String>,
}

/// Arguments of `commit`; absolute paths of images of the chain.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Commit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// Name of the image whose data goes down; `None`: the one on top.
    pub top: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// Name of the image that gets the data; `None`: the next one.
    pub base: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// How it is run; `None`: in the foreground, without a speed limit.
    pub job: Option<Terms>,
}

/// Arguments of `stream`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Stream {
    /// Absolute path of the image of the chain that becomes the backing file of the top; `None`:
    /// the top has none afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// How it is run; `None`: in the foreground, without a speed limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Terms>,
}

/// Arguments of `mirror`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Mirror {
    /// Absolute path of the file or device that is written, or the URI of an NBD export. It is
    /// there already.
    pub target: String,
    /// Its format, raw or qcow2; `None`: it is looked at, and a raw one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// It is raw, and keeps no note of that, so its first sector is protected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protect_raw: bool,
    /// What is copied at the beginning: full, top or none; `None`: full, or what the bitmap says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<String>,
    /// A bitmap of the image on top: what it has marked is copied at the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Writes of clients go to the target before they are answered.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub write_blocking: bool,
    /// The disk switches over to the target as soon as that is in step. Otherwise the job is ready
    /// then, and waits for `job-complete` or `job-cancel`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
    /// How it is run; `None`: in the foreground, without a speed limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Terms>,
}

/// What the user allows by naming a target.
///
/// * `file`: where that is a file.
fn target_allowed(
    target: &str,
    format: Option<&str>,
    file: fn(PathBuf, (u64, u64), Format) -> Allows,
) -> Option<Allows> {
    let path = Path::new(target);
    if !is_export(path) {
        let meta = std::fs::metadata(path).ok()?;
        // A raw one is called so.
        let format = format.unwrap_or(Format::Qcow2.name()).parse().ok()?;
        return Some(file(path.to_owned(), (meta.dev(), meta.ino()), format));
    }
    let name = FileName::export_of(path).ok()??;
    Some(Allows::Servers(name.nbd?.server.look_up().ok()?))
}

/// Arguments of `backup`. With a descriptor before that of the user's word: the fleecing file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Backup {
    /// As [`Mirror::target`].
    pub target: String,
    /// As [`Mirror::format`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// As [`Mirror::protect_raw`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protect_raw: bool,
    /// What is copied: full or top; `None`: full, or what the bitmap says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<String>,
    /// A bitmap of the image on top: what it has marked is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Most bytes in the fleecing file.
    pub fleece_max: u64,
    /// How it is run; `None`: in the foreground, without a speed limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Terms>,
}

/// Arguments of `backing`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NewBacking {
    /// Absolute path; none: no backing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Its format, raw or qcow2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// Arguments of `accel`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Accel {
    /// Whether the host kernel is to serve.
    pub on: bool,
}

/// Arguments of `copy-on-read`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CopyOnRead {
    /// Whether what is read of images below is kept in the one on top.
    pub on: bool,
}

/// Arguments of `stop`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Stop {
    /// Now, also while clients use the mount. Left out where it is not meant, so that older servers
    /// understand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Arguments of `limit`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Limit {
    /// What changes, as `NAME=VALUE,…`, or `none`; left out: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

/// What a client asks of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Counters.
    Stats,
    /// The machine, and where the disk is served on it.
    Topology,
    /// What the disk is, where it is, who uses it.
    Describe,
    /// Samples for Prometheus.
    Metrics,
    /// What happens from now on, one line for each event, until the client leaves.
    Events,
    /// Another size.
    Resize(Resize),
    /// A new overlay on top.
    Snapshot(Snapshot),
    /// Data of an overlay goes into an image below.
    Commit(Commit),
    /// Data of images below goes into the one on top.
    Stream(Stream),
    /// The disk is copied to a target, which it may switch over to.
    Mirror(Mirror),
    /// The state of the disk at one instant is copied to a target. With descriptors.
    Backup(Backup),
    /// Another backing file.
    Backing(NewBacking),
    /// Something of the jobs.
    Job(JobCommand),
    /// The host kernel serves, or does not.
    Accel(Accel),
    /// What is read of images below is kept, or not.
    CopyOnRead(CopyOnRead),
    /// The state of the disk is kept for readers. With descriptors.
    CheckpointBegin(Box<Begin>),
    /// It is kept no longer.
    CheckpointEnd(End),
    /// Which states are kept.
    CheckpointList,
    /// What the bitmap of a checkpoint has marked.
    CheckpointDirty(Dirty),
    /// Limits of its clients.
    Limit(Limit),
    /// The end.
    Stop(Stop),
}

impl Command {
    /// Its name and arguments.
    fn parts(&self) -> (&'static str, Value) {
        match self {
            Command::Stats => ("stats", json!({})),
            Command::Topology => ("topology", json!({})),
            Command::Describe => ("describe", json!({})),
            Command::Metrics => ("metrics", json!({})),
            Command::Events => ("events", json!({})),
            Command::Resize(arguments) => ("resize", json!(arguments)),
            Command::Snapshot(arguments) => ("snapshot", json!(arguments)),
            Command::Commit(arguments) => ("commit", json!(arguments)),
            Command::Stream(arguments) => ("stream", json!(arguments)),
            Command::Mirror(arguments) => ("mirror", json!(arguments)),
            Command::Backup(arguments) => ("backup", json!(arguments)),
            Command::Backing(arguments) => ("backing", json!(arguments)),
            Command::Job(command) => command.parts(),
            Command::Accel(arguments) => ("accel", json!(arguments)),
            Command::CopyOnRead(arguments) => ("copy-on-read", json!(arguments)),
            Command::CheckpointBegin(arguments) => ("checkpoint-begin", json!(arguments)),
            Command::CheckpointEnd(arguments) => ("checkpoint-end", json!(arguments)),
            Command::CheckpointList => ("checkpoint-list", json!({})),
            Command::CheckpointDirty(arguments) => ("checkpoint-dirty", json!(arguments)),
            Command::Limit(arguments) => ("limit", json!(arguments)),
            Command::Stop(arguments) => ("stop", json!(arguments)),
        }
    }

    /// The line that asks for it, without its end.
    pub fn line(&self) -> String {
        let (name, arguments) = self.parts();
        json!({ "execute": name, "arguments": arguments }).to_string()
    }

    /// What the user who gives it allows of images below the one on top.
    pub fn allows(&self) -> Option<Allows> {
        match self {
            Command::Commit(_) => Some(Allows::Writing),
            Command::Mirror(Mirror { target, format, .. }) => {
                target_allowed(target, format.as_deref(), Allows::Target)
            }
            Command::Backup(Backup { target, format, .. }) => {
                target_allowed(target, format.as_deref(), Allows::Copy)
            }
            // The base is in the chain.
            Command::Stream(_) => Some(Allows::Notes(None)),
            Command::Backing(NewBacking { file, format }) => {
                let meta = file.as_ref().and_then(|path| std::fs::metadata(path).ok());
                let format = format.as_deref().and_then(|format| format.parse().ok());
                let file = meta.map(|meta| (meta.dev(), meta.ino())).zip(format);
                Some(Allows::Notes(file))
            }
            _ => None,
        }
    }

    /// Whether it begins a job.
    pub(super) fn begins_job(&self) -> bool {
        matches!(
            self,
            Command::Commit(_) | Command::Stream(_) | Command::Mirror(_) | Command::Backup(_)
        )
    }

    /// Whether the user's word is needed when the client that gave it has left: the command goes
    /// on, and has more opened, or another process goes on with it.
    pub fn needs_word_later(&self) -> bool {
        match self {
            Command::Commit(Commit { job: Some(terms), .. })
            | Command::Stream(Stream { job: Some(terms), .. })
            | Command::Mirror(Mirror { job: Some(terms), .. })
            | Command::Backup(Backup { job: Some(terms), .. }) => terms.background,
            _ => false,
        }
    }

    /// Reads a command. Errors: no such command, or arguments that it has not.
    pub fn read(request: &Request) -> Result<Command, Refusal> {
        fn of<T: for<'a> Deserialize<'a>>(request: &Request) -> Result<T, Refusal> {
            serde_json::from_value(Value::Object(request.arguments.clone())).map_err(|error| {
                let name = request.execute.escape_debug();
                Refusal::usage(format!("arguments of '{name}': {error}"))
            })
        }
        /// No arguments.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Nothing {}
        if let Some(command) = JobCommand::read(&request.execute, &request.arguments) {
            return command.map(Command::Job);
        }
        match request.execute.as_str() {
            "stats" => of::<Nothing>(request).map(|_| Command::Stats),
            "topology" => of::<Nothing>(request).map(|_| Command::Topology),
            "describe" => of::<Nothing>(request).map(|_| Command::Describe),
            "metrics" => of::<Nothing>(request).map(|_| Command::Metrics),
            "events" => of::<Nothing>(request).map(|_| Command::Events),
            "resize" => of(request).map(Command::Resize),
            "snapshot" => of(request).map(Command::Snapshot),
            "commit" => of(request).map(Command::Commit),
            "stream" => of(request).map(Command::Stream),
            "mirror" => of(request).map(Command::Mirror),
            "backup" => of(request).map(Command::Backup),
            "backing" => of(request).map(Command::Backing),
            "accel" => of(request).map(Command::Accel),
            "copy-on-read" => of(request).map(Command::CopyOnRead),
            "checkpoint-begin" => of(request).map(Command::CheckpointBegin),
            "checkpoint-end" => of(request).map(Command::CheckpointEnd),
            "checkpoint-list" => of::<Nothing>(request).map(|_| Command::CheckpointList),
            "checkpoint-dirty" => of(request).map(Command::CheckpointDirty),
            "limit" => of(request).map(Command::Limit),
            "stop" => of(request).map(Command::Stop),
            other => Err(Refusal {
                class: "CommandNotFound",
                ..Refusal::usage(format!(
                    "no such command: '{}'; known: stats, topology, describe, metrics, events, \
                     resize, snapshot, commit, stream, mirror, backup, backing, accel, \
                     copy-on-read, \
                     limit, checkpoint-begin, checkpoint-end, checkpoint-list, checkpoint-dirty, \
                     {}, stop",
                    other.escape_debug(),
                    JobCommand::NAMES
                ))
            }),
        }
    }
}

/// One line of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Name of the command.
    pub execute: String,
    /// Its arguments, by their names.
    pub arguments: Map<String, Value>,
    /// Comes back in each line of the answer.
    pub id: Option<Value>,
}

impl Request {
    /// Errors: not JSON, not an object, keys that mean nothing here.
    pub fn read(line: &[u8]) -> Result<Request, Refusal> {
        let value = serde_json::from_slice(line)
            .map_err(|error| Refusal::usage(format!("not a line of JSON: {error}")))?;
        let Value::Object(mut object) = value else {
            return Err(Refusal::usage("not a JSON object"));
        };
        let id = object.remove("id");
        let Some(Value::String(execute)) = object.remove("execute") else {
            return Err(Refusal::usage("'execute' is missing or no text"));
        };
        let arguments = match object.remove("arguments") {
            None => Map::new(),
            Some(Value::Object(arguments)) => arguments,
            Some(_) => return Err(Refusal::usage("'arguments' is no object")),
        };
        match object.keys().next() {
            Some(key) => Err(Refusal::usage(format!("unknown key '{}'", key.escape_debug()))),
            None => Ok(Request { execute, arguments, id }),
        }
    }
}

/// The first line of a server.
pub fn greeting() -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({ "ringdisk": { "version": version, "protocol": VERSION, "tells-end": true } })
}

/// The last line of a server: how it ended.
///
/// * `exit`: the exit code of a process that serves nothing else.
pub fn ended(exit: u8, text: &str) -> Value {
    json!({ "ended": { "exit": exit, "desc": text } })
}

/// A line of the answer to the request with `id`.
fn answer(id: Option<&Value>, key: &str, value: Value) -> Value {
    let mut line = Map::new();
    if let Some(id) = id {
        line.insert(String::from("id"), id.clone());
    }
    line.insert(key.to_owned(), value);
    Value::Object(line)
}

/// It is done.
pub fn done(id: Option<&Value>, value: Value) -> Value {
    answer(id, "return", value)
}

/// It is not done.
pub fn refused(id: Option<&Value>, refusal: &Refusal) -> Value {
    let mut error = json!({ "class": refusal.class, "desc": refusal.text, "exit": refusal.exit });
    if let (Some(hint), Value::Object(error)) = (&refusal.hint, &mut error) {
        error.insert(String::from("hint"), json!(hint));
    }
    answer(id, "error", error)
}

/// How far it is, bytes.
pub fn progress(id: Option<&Value>, done: u64, total: u64) -> Value {
    answer(id, "progress", json!({ "done": done, "total": total }))
}

/// What a client makes of a line.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The first line of a server.
    Greeting {
        /// Version of the protocol.
        protocol: u64,
        /// It will say how it ends.
        tells_end: bool,
    },
    /// The command was carried out; what it gives.
    Done(Value),
    /// The command was not carried out.
    Refused {
        /// Why.
        text: String,
        /// What the user can do.
        hint: Option<String>,
        /// The exit code for the client, if the server has one.
        exit: Option<u8>,
    },
    /// How far the command is.
    Progress {
        /// Steps that are done.
        done: u64,
        /// Steps in all; 0: not known yet.
        total: u64,
    },
    /// Something has happened.
    Event(Value),
    /// How the server ended; its last line.
    Ended {
        /// The exit code of the server.
        exit: u8,
        /// Why it ended.
        text: String,
    },
}

impl Reply {
    /// `None`: not a line of this protocol.
    pub fn read(line: &[u8]) -> Option<Reply> {
        let value: Value = serde_json::from_slice(line).ok()?;
        if let Some(greeting) = value.get("ringdisk") {
            let protocol = greeting.get("protocol")?.as_u64()?;
            let tells_end = greeting.get("tells-end") == Some(&Value::Bool(true));
            return Some(Reply::Greeting { protocol, tells_end });
        }
        if let Some(ended) = value.get("ended") {
            let exit = ended.get("exit")?.as_u64()?.try_into().ok()?;
            let text = visible(ended.get("desc").and_then(Value::as_str).unwrap_or_default());
            return Some(Reply::Ended { exit, text });
        }
        if value.get("event").is_some_and(Value::is_string) {
            return Some(Reply::Event(value));
        }
        if let Some(value) = value.get("return") {
            return Some(Reply::Done(value.clone()));
        }
        if let Some(progress) = value.get("progress") {
            let number = |key| progress.get(key).and_then(Value::as_u64);
            return Some(Reply::Progress { done: number("done")?, total: number("total")? });
        }
        let error = value.get("error")?;
        let text = |key| error.get(key).and_then(Value::as_str).map(visible);
        Some(Reply::Refused {
            text: text("desc")?,
            hint: text("hint"),
            exit: error.get("exit").and_then(Value::as_u64).and_then(|exit| exit.try_into().ok()),
        })
    }
}

#[cfg(test)]
mod tests;
