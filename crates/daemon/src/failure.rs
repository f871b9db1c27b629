//! From an error to a message and an exit code.
//!
//! Promises: every way out of the program ends with one of the codes of [`Exit`], which never
//! change their meaning; a message says each thing once, although some errors repeat their causes
//! and some do not.

mod cause;

use std::error::Error as StdError;
use std::io;

use ringdisk_export::HaltReason;
use ringdisk_ring::SetupError;

pub use cause::Cause;

/// How the program ends. The numbers are an interface: scripts match on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It did what it was told.
    Clean = 0,
    /// A failure without a code of its own.
    General = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// The image.
    Image = 3,
    /// The mountpoint.
    Mountpoint = 4,
    /// Another process uses it.
    Locked = 5,
    /// Not allowed.
    Permission = 6,
    /// The export was halted.
    Halted = 7,
    /// No io_uring.
    IoUring = 8,
    /// No FUSE.
    Fuse = 9,
    /// A resource limit.
    Limit = 10,
    /// Not in this version.
    Unsupported = 11,
    /// Storage did not answer, or not with success, at the end.
    Storage = 12,
    /// Ended while it was in use.
    Forced = 13,
    /// A server does not answer.
    Timeout = 14,
}

/// Every code with its meaning, for the man pages and `docs/exit-codes.md`.
pub const MEANINGS: [(Exit, &str, &str); 15] = [
    (
        Exit::Clean,
        "success",
        "The command did what it was told; a mount was stopped by a signal or unmounted and nobody \
         uses it any more, a served disk was stopped.",
    ),
    (Exit::General, "failure", "A failure that has no code of its own; the message tells."),
    (
        Exit::Usage,
        "usage",
        "The command line is wrong: an unknown option, a bad size, options that exclude each \
         other; or it asks for what the image or the machine does not have, such as a snapshot of \
         that name or a CPU.",
    ),
    (
        Exit::Image,
        "image",
        "The image does not exist, is not an image, has an unknown format, is damaged, or cannot \
         be read; or its disk has no such partition (`--partition`) or range (`--offset`, \
         `--size`).",
    ),
    (
        Exit::Mountpoint,
        "mountpoint",
        "The mountpoint does not exist and cannot be made, is not a regular file, or has a mount \
         on it; for serve: the same of the socket; for umount and ctl: nothing of ours is mounted \
         or served there.",
    ),
    (
        Exit::Locked,
        "busy",
        "Another process holds the image, the pid file, the socket, or (umount, ctl stop) the \
         mount; for ctl: another command is changing the disk.",
    ),
    (
        Exit::Permission,
        "permission",
        "The system does not allow it: a file mode, another owner, --allow-other without \
         user_allow_other.",
    ),
    (
        Exit::Halted,
        "halted",
        "The mount was serving and then broke down: the kernel connection failed or sent what \
         cannot be; or a served disk did. For ctl stop and umount also: the server was killed.",
    ),
    (Exit::IoUring, "io_uring", "io_uring is forbidden or missing here."),
    (Exit::Fuse, "fuse", "FUSE is missing here: no /dev/fuse, no driver, or no fusermount3."),
    (
        Exit::Limit,
        "limit",
        "A resource limit (open files, locked memory) is too low and could not be raised.",
    ),
    (
        Exit::Unsupported,
        "unsupported",
        "The image or the command asks for something that this version, or with `--sandbox on` or \
         `--accel require` this kernel (a module that is not there, not allowed, or does not fit), \
         does not do.",
    ),
    (
        Exit::Storage,
        "storage",
        "Storage below the image did not answer in time, so requests ended with errors, or the \
         last flush failed, or an image could not be written to the end: recent writes may not be \
         on stable storage. Or there is no room for what the command writes (a full file system, a \
         quota), or for backup no room for what clients overwrote meanwhile (`--fleece-max`); the \
         disk shows what it showed. For ctl stop and umount: the server has ended so.",
    ),
    (
        Exit::Forced,
        "forced",
        "A mount ended while it was in use: by a second signal, by `ringdisk ctl stop --force`, at \
         the end of --stop-timeout, or because its connection was aborted (`umount -f`), also \
         while no process served a kept mount. What was answered is on stable storage; what its \
         users had not written yet is lost. For ctl stop and umount without --force: the server \
         has ended so.",
    ),
    (
        Exit::Timeout,
        "timeout",
        "For ctl, topology and umount: the server did not answer, or did not end, in time; it may \
         be stopped or overloaded.",
    ),
];

impl Exit {
    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Whether a number is the code of a failure.
    pub fn is_failure(code: u8) -> bool {
        code != 0 && MEANINGS.iter().any(|(exit, ..)| exit.code() == code)
    }
}

/// Why a command failed, ready to be printed.
#[derive(Debug)]
pub struct Failure {
    /// How the command ends, unless it has a code of its own.
    pub exit: Exit,
    message: String,
    hint: Option<String>,
    cause: Option<Box<Cause>>,
    /// A code of the command's own, where it has qemu-img's.
    code: Option<u8>,
    /// The signal that ended the command.
    signal: Option<i32>,
}

impl Failure {
    /// * `message`: the object and the reason.
    pub fn new(exit: Exit, message: impl Into<String>) -> Failure {
        let message = message.into();
        Failure { exit, message, hint: None, cause: None, code: None, signal: None }
    }

    /// From an error with all of its causes.
    pub fn caused(exit: Exit, error: &(dyn StdError + 'static)) -> Failure {
        let exit = if exit == Exit::Image && is_full(error) { Exit::Storage } else { exit };
        let cause = Cause::of(error).map(Box::new);
        Failure { cause, ..Failure::new(exit, chain(error)) }
    }

    /// From an error of the system while `doing` was being done.
    ///
    /// `otherwise` is the code unless the system's error has one of its own.
    pub fn system(doing: impl Into<String>, error: &io::Error, otherwise: Exit) -> Failure {
        let exit = match error.kind() {
            io::ErrorKind::PermissionDenied => Exit::Permission,
            _ if matches!(error.raw_os_error(), Some(EMFILE | ENFILE)) => Exit::Limit,
            _ if matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT)) => Exit::Storage,
            _ => otherwise,
        };
        Failure::new(exit, format!("{}: {}", doing.into(), words(error)))
    }

    /// Adds what the user can do, shown on a line of its own.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the cause, for programs.
    pub fn because(mut self, cause: Cause) -> Failure {
        self.cause = Some(Box::new(cause));
        self
    }

    /// Adds what has become of what was asked for.
    pub fn outcome(mut self, what: &str) -> Failure {
        self.message = format!("{}; {what}", self.message);
        self
    }

    /// Ends the command with this code instead of that of [`Failure::exit`].
    pub fn with_code(mut self, code: u8) -> Failure {
        self.code = Some(code);
        self
    }

    /// Ends the command as this signal does.
    pub fn by_signal(mut self, signal: i32) -> Failure {
        self.signal = Some(signal);
        self
    }

    /// The number that the shell sees.
    pub fn code(&self) -> u8 {
        self.code.unwrap_or(self.exit.code())
    }

    /// The code that the command has of its own, where it has qemu-img's.
    pub fn own_code(&self) -> Option<u8> {
        self.code
    }

    /// The signal that ended the command, if one did.
    pub fn signal(&self) -> Option<i32> {
        self.signal
    }

    /// Puts what was being done in front of the message.
    pub fn context(mut self, doing: impl std::fmt::Display) -> Failure {
        self.message = format!("{doing}: {}", self.message);
        self.cause = self.cause.map(|cause| Box::new(cause.of_part()));
        self
    }

    /// Why, where a program could act on that or say it in words of its own.
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_deref()
    }

    /// What is wrong with an image, wherever in its chain that is.
    pub fn image_cause(&self) -> Option<&ringdisk_disk::Cause> {
        match self.cause() {
            Some(Cause::Image(cause)) => Some(cause.root()),
            _ => None,
        }
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What the user can do.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

const EMFILE: i32 = 24;
const ENFILE: i32 = 23;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

/// Whether there was no room for what was to be written: nothing is wrong with the image then.
fn is_full(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(cause) = next {
        let errno = match cause.downcast_ref::<ringdisk_disk::Error>() {
            Some(error) => error.errno().map(ringdisk_ring::Errno::raw_os_error),
            None => cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error),
        };
        if matches!(errno, Some(ENOSPC | EDQUOT)) {
            return true;
        }
        next = cause.source();
    }
    false
}

/// The system's words without the `(os error N)` that the standard library adds.
pub fn words(error: &io::Error) -> String {
    strip_os_error(&error.to_string())
}

/// Removes each `(os error N)` from a text.
fn strip_os_error(text: &str) -> String {
    let mut rest = text;
    let mut result = String::with_capacity(text.len());
    while let Some(at) = rest.find(" (os error ") {
        let (before, after) = rest.split_at(at);
        result.push_str(before);
        rest = match after.find(')') {
            Some(end) => after.get(end + 1..).unwrap_or(""),
            None => "",
        };
    }
    result.push_str(rest);
    result
}

/// An error and its causes in one line; a cause that the text before already tells is left out.
pub fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = strip_os_error(&error.to_string());
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = strip_os_error(&cause.to_string());
        // "Operation not permitted" and "operation not permitted" are one thing to a reader.
        if !text.to_lowercase().contains(&cause_text.to_lowercase()) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

impl From<ringdisk_disk::Error> for Failure {
    fn from(error: ringdisk_disk::Error) -> Failure {
        use ringdisk_disk::ErrorKind;
        let exit = match error.kind() {
            ErrorKind::PermissionDenied | ErrorKind::NotAllowed => Exit::Permission,
            ErrorKind::Unsupported => Exit::Unsupported,
            ErrorKind::Locked | ErrorKind::Busy => Exit::Locked,
            // By a stop, or since nobody waits: nothing is wrong with the image.
            ErrorKind::Cancelled => Exit::General,
            _ => Exit::Image,
        };
        Failure::caused(exit, &error)
    }
}

impl From<ringdisk_storage::Error> for Failure {
    fn from(error: ringdisk_storage::Error) -> Failure {
        use ringdisk_storage::ErrorKind;
        let exit = match error.kind() {
            ErrorKind::Locked => Exit::Locked,
            ErrorKind::PermissionDenied | ErrorKind::ReadOnly => Exit::Permission,
            _ => Exit::Image,
        };
        Failure::caused(exit, &error)
    }
}

impl From<ringdisk_qcow2::Error> for Failure {
    fn from(error: ringdisk_qcow2::Error) -> Failure {
        use ringdisk_qcow2::ErrorKind;
        let exit = match error.kind() {
            ErrorKind::Unsupported | ErrorKind::Encrypted => Exit::Unsupported,
            ErrorKind::InvalidRequest => Exit::Usage,
            _ => Exit::Image,
        };
        Failure::caused(exit, &error)
    }
}

impl From<ringdisk_export::Error> for Failure {
    fn from(error: ringdisk_export::Error) -> Failure {
        // A ring that could not be made is a cause here; its own code says more.
        let exit = ring_exit(&error).unwrap_or_else(|| export_exit(error.kind()));
        let failure = Failure::caused(exit, &error);
        Failure { hint: error.hint_text().map(str::to_owned), ..failure }
    }
}

/// The code of an error of an export.
fn export_exit(kind: ringdisk_export::ErrorKind) -> Exit {
    use ringdisk_export::ErrorKind;
    match kind {
        ErrorKind::NotFound
        | ErrorKind::NotRegular
        | ErrorKind::Occupied
        | ErrorKind::AlreadyOurs
        | ErrorKind::Stale
        | ErrorKind::NotMounted
        | ErrorKind::Socket => Exit::Mountpoint,
        ErrorKind::Busy => Exit::Locked,
        ErrorKind::PermissionDenied | ErrorKind::AllowOtherDenied => Exit::Permission,
        ErrorKind::DeviceMissing
        | ErrorKind::DeviceForbidden
        | ErrorKind::HelperMissing
        | ErrorKind::TransportMissing => Exit::Fuse,
        ErrorKind::Unsupported => Exit::Unsupported,
        ErrorKind::RingForbidden => Exit::IoUring,
        ErrorKind::Halted => Exit::Halted,
        ErrorKind::Storage => Exit::Storage,
        ErrorKind::Usage => Exit::Usage,
        _ => Exit::General,
    }
}

impl Failure {
    /// Of an export that ended by itself.
    ///
    /// * `fault`: what is wrong with its disk, which may say better why the storage failed.
    pub fn of_halt(reason: &HaltReason, fault: Option<String>) -> Failure {
        let exit = match reason {
            HaltReason::Timeout(_)
            | HaltReason::Flush(_)
            | HaltReason::StillInFlight(_)
            | HaltReason::GaveUp => Exit::Storage,
            HaltReason::Forced(_) | HaltReason::StillInUse(..) | HaltReason::Aborted(_) => {
                Exit::Forced
            }
            HaltReason::Device(..)
            | HaltReason::Reply(..)
            | HaltReason::Protocol(..)
            | HaltReason::Panicked => Exit::Halted,
            HaltReason::Failed(kind, _) => export_exit(*kind),
        };
        match (reason, fault) {
            (HaltReason::Flush(_) | HaltReason::GaveUp, Some(fault)) => Failure::new(exit, fault),
            _ => Failure {
                hint: reason.hint_text().map(str::to_owned),
                ..Failure::new(exit, strip_os_error(&reason.to_string()))
            },
        }
    }

    /// Of a change that was asked for: options that make no sense for this image are a mistake of
    /// the command line.
    pub fn of_change(error: ringdisk_disk::Error) -> Failure {
        match error.kind() {
            ringdisk_disk::ErrorKind::Invalid => Failure::caused(Exit::Usage, &error),
            _ => Failure::from(error),
        }
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Failure {
        Failure::caused(setup_exit(&error), &error)
    }
}

/// The code of a ring that could not be made.
fn setup_exit(error: &SetupError) -> Exit {
    match error {
        SetupError::Forbidden(_) | SetupError::Missing(_) => Exit::IoUring,
        SetupError::Limit(_) => Exit::Limit,
        SetupError::Other(_) => Exit::General,
    }
}

/// The code of a ring's failure somewhere among the causes.
fn ring_exit(error: &(dyn StdError + 'static)) -> Option<Exit> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(setup) = cause.downcast_ref::<SetupError>() {
            return Some(setup_exit(setup));
        }
        next = cause.source();
    }
    None
}

#[cfg(test)]
mod tests;
