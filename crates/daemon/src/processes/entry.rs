//! One disk of the list, from what its server says, its socket and its mount.
//!
//! Promises: pure, but for names of processes and users; whatever a server says becomes an entry
//! whose text controls no terminal.

use std::fs;
use std::time::SystemTime;

use ringdisk_fuse::mount::MountEntry;
use serde_json::{Value, json};

use crate::control::ask_all::{Answer, Asked};
use crate::control::registry::{Found, owner_of};
use crate::run_as::user_name;
use crate::terminal::{shell_word, visible};

/// How a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// All is well.
    Serving,
    /// It was told to end, and its users have it open.
    Stopping,
    /// Something is wrong with it, in this word of the server.
    Trouble(String),
    /// Its server lives and does not answer.
    Silent,
    /// Its server does not listen, and its mount answers.
    NoControl,
    /// Its server is gone, and its mount is left.
    DeadMount,
    /// Its server is gone, and its control socket is left.
    StaleSocket,
}

impl State {
    /// One word, for programs and tables.
    pub fn word(&self) -> &str {
        match self {
            State::Serving => "serving",
            State::Stopping => "stopping",
            State::Trouble(word) => word,
            State::Silent => "silent",
            State::NoControl => "no-control",
            State::DeadMount => "dead",
            State::StaleSocket => "stale",
        }
    }
}

/// One disk, or what is left of one.
#[derive(Clone, Debug)]
pub struct Entry {
    /// How it is.
    pub state: State,
    /// Why, in words.
    pub why: Option<String>,
    /// The serving process.
    pub pid: Option<u32>,
    /// Whose it is.
    pub user: Option<u32>,
    /// `mount`, `vhost-user-blk` or `nbd`.
    pub kind: String,
    /// The mountpoint, the socket, or the addresses.
    pub place: String,
    /// Where else it is served.
    pub also: Option<String>,
    /// The image, as the server names it.
    pub image: String,
    /// Its format.
    pub format: Option<String>,
    /// Of the disk, bytes.
    pub size: Option<u64>,
    /// It cannot be written.
    pub is_read_only: bool,
    /// Since when this process serves it, seconds since 1970.
    pub since: Option<u64>,
    /// Number of the FUSE connection, of a mount.
    pub connection: Option<u32>,
    /// Who uses it, each in words.
    pub users: Vec<String>,
    /// Its jobs that have not ended, as [`crate::control::jobs::Job::to_json`] has them.
    pub jobs: Vec<Value>,
    /// The version of the server.
    pub version: Option<String>,
    /// The command that clears away what is left, or helps.
    pub command: Option<String>,
}

impl Entry {
    fn new(state: State, place: String) -> Entry {
        Entry {
            state,
            why: None,
            pid: None,
            user: None,
            kind: String::from("unknown"),
            place,
            also: None,
            image: String::new(),
            format: None,
            size: None,
            is_read_only: false,
            since: None,
            connection: None,
            users: Vec::new(),
            jobs: Vec::new(),
            version: None,
            command: None,
        }
    }

    /// A control socket, and what its server said. `None`: it was just removed.
    ///
    /// * `mount`: the mount of its number, if that is in the tree.
    pub(super) fn of_socket(
        found: &Found,
        asked: &Asked,
        mount: Option<&MountEntry>,
    ) -> Option<Entry> {
        let place = mount.map_or_else(
            || visible(&found.path.display().to_string()),
            |mount| visible(&mount.mountpoint.display().to_string()),
        );
        let mut entry = Entry {
            pid: asked.pid,
            user: Some(found.owner),
            since: found.made.and_then(seconds),
            connection: found.connection,
            ..Entry::new(State::Serving, place)
        };
        if let Some(mount) = mount {
            entry.kind = String::from("mount");
            entry.image = visible(&mount.source.to_string_lossy());
        }
        match &asked.answer {
            // Another user's server in the directory of this one says nothing that counts.
            _ if asked.user.is_some_and(|user| user != 0 && user != found.owner) => {
                entry.state = State::Trouble(String::from("foreign"));
                entry.why = Some(String::from("another user's process listens on this socket"));
            }
            Answer::Value(value) => entry.take(value),
            Answer::Refused(text) => {
                entry.why = Some(format!("it says only: {}", visible(text)));
            }
            Answer::Silent => {
                entry.state = State::Silent;
                let is_stopped = asked.pid.is_some_and(is_stopped);
                entry.why = Some(String::from(match is_stopped {
                    true => "its process is stopped",
                    false => "its process does not answer: it may be stopped or overloaded",
                }));
                entry.command =
                    asked.pid.filter(|_| is_stopped).map(|pid| format!("kill -CONT {pid}"));
            }
            Answer::Dead => {
                entry.state = State::StaleSocket;
                entry.pid = None;
                entry.why =
                    Some(String::from("its server is gone, and its control socket is left"));
                let word = shell_word(&found.path.display().to_string());
                entry.command = Some(format!("rm {word}"));
            }
            Answer::Unreachable(_) => return None,
        }
        Some(entry)
    }

    /// A mount whose server does not listen.
    pub(super) fn of_mount(mount: &MountEntry, is_dead: bool) -> Entry {
        let path = mount.mountpoint.display().to_string();
        let (state, why, command) = match is_dead {
            true => (
                State::DeadMount,
                "its server was killed, or crashed, and its mount is left",
                Some(format!("ringdisk umount {}", shell_word(&path))),
            ),
            false => {
                (State::NoControl, "its server has no control socket that can be seen here", None)
            }
        };
        Entry {
            why: Some(String::from(why)),
            user: owner_of(mount),
            kind: String::from("mount"),
            image: visible(&mount.source.to_string_lossy()),
            connection: mount.connection(),
            command,
            ..Entry::new(state, visible(&path))
        }
    }

    /// Takes over what a server says.
    fn take(&mut self, value: &Value) {
        let text = |key: &str| value[key].as_str().map(visible);
        self.state = match value["state"].as_str() {
            Some("serving") => State::Serving,
            Some("stopping") => State::Stopping,
            Some(other) => State::Trouble(visible(other)),
            None => State::Trouble(String::from("unknown")),
        };
        self.why = text("why");
        self.kind = text("kind").unwrap_or_default();
        if let Some(place) = text("where").filter(|place| !place.is_empty()) {
            self.place = place;
        }
        self.also = text("also");
        self.image = text("image").unwrap_or_default();
        self.format = text("format");
        self.size = value["size"].as_u64();
        self.is_read_only = value["read-only"].as_bool().unwrap_or(false);
        self.since = value["since"].as_u64().or(self.since);
        self.version = text("version");
        let clients = value["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
        self.users = clients.iter().map(client).collect();
        self.jobs = value["jobs"].as_array().cloned().unwrap_or_default();
    }

    /// Whether its server runs.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, State::DeadMount | State::StaleSocket)
    }

    /// Whether it is the disk behind a mount.
    pub(super) fn is_of(&self, mount: &MountEntry) -> bool {
        self.connection.is_some() && self.connection == mount.connection()
    }

    /// The user's name, or number.
    pub fn user_text(&self) -> String {
        let name = |user: u32| user_name(user).unwrap_or_else(|| user.to_string());
        self.user.map_or_else(|| String::from("?"), name)
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        json!({
            "state": self.state.word(),
            "why": self.why,
            "pid": self.pid,
            "user": self.user_text(),
            "uid": self.user,
            "kind": self.kind,
            "where": self.place,
            "also": self.also,
            "image": self.image,
            "format": self.format,
            "size": self.size,
            "read-only": self.is_read_only,
            "since": self.since,
            "used-by": self.users,
            "jobs": self.jobs,
            "version": self.version,
            "command": self.command,
        })
    }
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> Option<u64> {
    time.duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_secs())
}

/// A client over a socket, in words.
fn client(value: &Value) -> String {
    if let Some(address) = value["address"].as_str() {
        return visible(address);
    }
    let Some(pid) = value["pid"].as_u64() else { return String::from("a client") };
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("process {pid}"),
        name => format!("process {pid} ({})", visible(name)),
    }
}

/// Whether a process was stopped by a signal or by a debugger.
fn is_stopped(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim().starts_with(['T', 't']))
}
