//! Where the messages of a serving process go once it serves: standard error, a file, the journal
//! or syslog.
//!
//! Promises: until the disk answers messages go to standard error, so a start that fails says why
//! to the user. What messages need is opened before the process is confined. Sending never waits: a
//! journal that does not read loses messages, the process loses nothing. A log file is appended
//! to, so programs that truncate it (logrotate's `copytruncate`) may do so at any time.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{FileType, fstat};

use crate::failure::{Exit, Failure};

/// The socket of journald's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).
const JOURNAL: &str = "/run/systemd/journal/socket";
/// The socket of syslog (RFC 3164, as syslog(3) writes it).
const SYSLOG: &str = "/dev/log";
/// The facility `daemon` of syslog, as part of a priority.
const DAEMON: u8 = 3 << 3;

/// The name in front of each message, which sockets get apart from it.
const NAME: &str = "ringdisk";

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// In the background the journal or syslog, where one of them listens; otherwise standard
    /// error.
    #[default]
    Auto,
    /// Standard error, which a process in the background keeps only where it is a regular file.
    StandardError,
    /// The journal of systemd.
    Journal,
    /// syslog.
    Syslog,
}

/// How lines are written to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Journal,
    Syslog,
}

/// What is opened, and used from [`begin`] on.
#[derive(Debug)]
enum Target {
    File(File),
    Socket(UnixDatagram, Language),
}

/// Opened, and not used yet.
static PREPARED: Mutex<Option<Target>> = Mutex::new(None);
/// Gets all messages.
static SOCKET: OnceLock<(UnixDatagram, Language)> = OnceLock::new();

/// What the next message of a thread is about, as fields of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// The disk or image.
    pub disk: Option<String>,
    /// The event: a word of the table in docs/operations.md.
    pub event: Option<String>,
}

thread_local! {
    static SUBJECT: RefCell<Subject> = RefCell::default();
}

/// Says what the next message of this thread is about.
pub fn next_is_about(subject: Subject) {
    SUBJECT.with(|about| *about.borrow_mut() = subject);
}

/// Opens what was asked for.
///
/// * `file`: the file of `--log-file`.
/// * `in_background`: nobody reads standard error once the disk answers.
///
/// Errors: the file cannot be opened; nobody listens where the user asked for it by name.
pub fn prepare(file: Option<&Path>, wanted: Wanted, in_background: bool) -> Result<(), Failure> {
    let target = match (file, wanted) {
        (Some(file), _) => Some(Target::File(open(file)?)),
        (None, Wanted::Journal) => Some(connect(JOURNAL, Language::Journal)?),
        (None, Wanted::Syslog) => Some(connect(SYSLOG, Language::Syslog)?),
        (None, Wanted::Auto) if in_background && !is_kept() => {
            let journal = connect(JOURNAL, Language::Journal);
            journal.or_else(|_| connect(SYSLOG, Language::Syslog)).ok()
        }
        (None, Wanted::Auto | Wanted::StandardError) => None,
    };
    *PREPARED.lock().unwrap_or_else(PoisonError::into_inner) = target;
    Ok(())
}

/// Whether standard error stays when the process goes into the background: a regular file does.
fn is_kept() -> bool {
    fstat(rustix::stdio::stderr())
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

fn open(path: &Path) -> Result<File, Failure> {
    let opened = OpenOptions::new().append(true).create(true).mode(0o640).open(path);
    opened.map_err(|error| {
        let doing = format!("cannot write the log file '{}'", path.display());
        Failure::system(doing, &error, Exit::General)
    })
}

fn connect(path: &str, language: Language) -> Result<Target, Failure> {
    connect_to(Path::new(path), language).map_err(|error| {
        let what = match language {
            Language::Journal => "the journal cannot be reached at",
            Language::Syslog => "syslog cannot be reached at",
        };
        Failure::system(format!("{what} '{path}'"), &error, Exit::General)
            .hint("--log-file FILE writes the messages to a file")
    })
}

fn connect_to(path: &Path, language: Language) -> io::Result<Target> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(path)?;
    socket.set_nonblocking(true)?;
    Ok(Target::Socket(socket, language))
}

/// From now on messages go where the user wants them. Called once the disk answers, and again
/// without effect.
pub fn begin() {
    match PREPARED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(Target::File(file)) => {
            // As standard error it has the messages of all threads, and those of a panic.
            if let Err(errno) = rustix::stdio::dup2_stderr(&file) {
                tracing::warn!("the log file cannot be used: {errno}");
            }
        }
        Some(Target::Socket(socket, language)) => {
            let _ = SOCKET.set((socket, language));
        }
        None => {}
    }
}

/// Sends messages to the journal or to syslog. `false`: they go to standard error.
pub(crate) fn send(bytes: &[u8]) -> bool {
    let subject = SUBJECT.take();
    let Some((socket, language)) = SOCKET.get() else { return false };
    for line in String::from_utf8_lossy(bytes).lines().filter(|line| !line.is_empty()) {
        let _ = socket.send(datagram(*language, line, &subject).as_bytes());
    }
    true
}

/// One message as one datagram.
fn datagram(language: Language, line: &str, subject: &Subject) -> String {
    let text = line.strip_prefix(NAME).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(line);
    let priority = priority(text);
    match language {
        Language::Journal => {
            let field = |name: &str, value: &Option<String>| {
                // A line break would begin another field.
                let value = value.as_deref().map(|value| value.replace('\n', "\\n"));
                value.map_or_else(String::new, |value| format!("{name}={value}\n"))
            };
            format!(
                "PRIORITY={priority}\nSYSLOG_IDENTIFIER={NAME}\nRINGDISK_VERSION={}\n{}{}MESSAGE=\
                 {text}\n",
                env!("CARGO_PKG_VERSION"),
                field("RINGDISK_DISK", &subject.disk),
                field("RINGDISK_EVENT", &subject.event),
            )
        }
        Language::Syslog => {
            format!("<{}>{NAME}[{}]: {text}", DAEMON | priority, std::process::id())
        }
    }
}

/// The priority of syslog(3) that the first word of a message says.
fn priority(text: &str) -> u8 {
    match text.split_once(' ').map_or(text, |(word, _)| word) {
        "error:" => 3,
        "warning:" => 4,
        "note:" => 5,
        "debug:" | "trace:" => 7,
        _ => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_datagrams_with_a_priority() {
        let about = Subject {
            disk: Some(String::from("/srv/a\nMESSAGE=b")),
            event: Some(String::from("io-error")),
        };
        let journal = datagram(Language::Journal, "ringdisk: error: a write failed", &about);
        assert!(journal.starts_with("PRIORITY=3\nSYSLOG_IDENTIFIER=ringdisk\n"), "{journal}");
        assert!(journal.ends_with("\nMESSAGE=error: a write failed\n"), "{journal}");
        assert!(journal.contains("\nRINGDISK_DISK=/srv/a\\nMESSAGE=b\n"), "{journal}");
        assert!(journal.contains("\nRINGDISK_EVENT=io-error\n"), "{journal}");
        let plain = datagram(Language::Journal, "ringdisk: ready", &Subject::default());
        assert!(!plain.contains("RINGDISK_DISK"), "{plain}");
        let syslog = datagram(Language::Syslog, "ringdisk: warning: slow", &about);
        let expected = format!("<28>ringdisk[{}]: warning: slow", std::process::id());
        assert_eq!(syslog, expected);
        assert_eq!([priority("note: x"), priority("ready"), priority("debug: y")], [5, 6, 7]);
    }

    #[test]
    fn a_socket_that_nobody_reads_keeps_no_sender_waiting() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("log");
        let reader = UnixDatagram::bind(&path).expect("bind");
        let Ok(Target::Socket(socket, language)) = connect_to(&path, Language::Syslog) else {
            panic!("no socket")
        };
        let text = datagram(language, "ringdisk: error: full", &Subject::default());
        let refused = (0..100_000).find(|_| socket.send(text.as_bytes()).is_err());
        assert!(refused.is_some());
        let mut bytes = [0; 512];
        let len = reader.recv(&mut bytes).expect("a message");
        assert!(String::from_utf8_lossy(&bytes[..len]).ends_with("error: full"));
        assert!(connect_to(&directory.path().join("none"), language).is_err());
    }
}
