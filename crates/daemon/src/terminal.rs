//! Printing.
//!
//! Promises: a stream that is closed, full or a broken pipe never ends the process and never
//! panics. Messages go to standard error; results go to standard output through [`Results`], which
//! reports a failed write where that matters. A process that serves ([`serves`]) waits a moment,
//! and no longer, for the reader of its standard error (a terminal may be paused, a pipe full);
//! after that it leaves the message out, and says in front of the next one how many it left out.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use ringdisk_disk::name::shell_word;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::{Exit, Failure, words};
use crate::log_target;

/// The name in front of each message.
pub const NAME: &str = "ringdisk";

/// The name in front of warnings, where the program was called by another one.
static CALLED: OnceLock<&str> = OnceLock::new();

/// Puts another name in front of warnings and notes, before the first of them.
pub fn call(name: &'static str) {
    // A second name would be a mistake of the caller and changes nothing.
    let _ = CALLED.set(name);
}

fn name() -> &'static str {
    CALLED.get().copied().unwrap_or(NAME)
}

/// Writes one line to standard output; a failure is ignored.
pub fn say(text: impl fmt::Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// Writes one line to standard error; a failure is ignored.
pub fn say_error(text: impl fmt::Display) {
    // One write, so that lines of several threads and processes do not mix.
    write_error(format!("{text}\n").as_bytes());
}

/// Clients rely on this process: it does not wait for readers of its messages.
static SERVES: AtomicBool = AtomicBool::new(false);
/// The last message found no reader.
static IS_STUCK: AtomicBool = AtomicBool::new(false);
/// Messages that were left out.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// How long a message waits for a reader.
const READER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// What a pipe takes at once when it can be written to (`PIPE_BUF`, pipe(7)).
const PIECE: usize = 4096;

/// From now on no thread waits for the reader of standard error.
pub fn serves() {
    SERVES.store(true, Ordering::Relaxed);
}

/// Writes to standard error; a failure is ignored. Any thread.
pub fn write_error(bytes: &[u8]) {
    if log_target::send(bytes) {
        return;
    }
    let mut out = io::stderr().lock();
    if !SERVES.load(Ordering::Relaxed) {
        let _ = out.write_all(bytes);
        return;
    }
    if !takes_a_piece(&out) {
        LEFT_OUT.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let left_out = LEFT_OUT.swap(0, Ordering::Relaxed);
    if left_out > 0 {
        let _ = writeln!(out, "{NAME}: {left_out} messages were left out, since nobody read them");
    }
    for (number, piece) in bytes.chunks(PIECE).enumerate() {
        if (number > 0 || left_out > 0) && !takes_a_piece(&out) {
            LEFT_OUT.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let _ = out.write_all(piece);
    }
}

/// Whether a stream takes [`PIECE`] bytes without waiting for its reader; gives that one a moment,
/// unless it did not come before.
fn takes_a_piece(out: &impl AsFd) -> bool {
    let time = if IS_STUCK.load(Ordering::Relaxed) { Timespec::default() } else { READER };
    // Where it cannot be asked, a write says what is wrong.
    let ready = poll(&mut [PollFd::new(out, PollFlags::OUT)], Some(&time)) != Ok(0);
    IS_STUCK.store(!ready, Ordering::Relaxed);
    ready
}

/// The process stands in for a program that does not say what it has tidied up.
static IS_TERSE: AtomicBool = AtomicBool::new(false);

/// Leaves notes about what was tidied up out from now on ([`note_of_tidying`]).
pub fn be_terse() {
    IS_TERSE.store(true, Ordering::Relaxed);
}

/// What was left by another process and is gone now.
pub fn note_of_tidying(text: impl fmt::Display) {
    if !IS_TERSE.load(Ordering::Relaxed) {
        note(text);
    }
}

/// Something worth knowing that stops nothing.
pub fn note(text: impl fmt::Display) {
    say_error(format_args!("{}: {} {text}", name(), paint("note:", "1;36")));
}

/// Something that the user should see to.
pub fn warn(text: impl fmt::Display) {
    say_error(format_args!("{}: {} {text}", name(), paint_warning("warning:")));
}

/// Why the command failed, and what to do.
pub fn complain(failure: &Failure) {
    say_error(format_args!("{NAME}: {} {}", paint_error("error:"), failure.message()));
    if let Some(hint) = failure.hint_text() {
        say_error(format_args!("  {} {hint}", paint("try:", "1")));
    }
}

/// Whether a person reads standard output.
pub fn is_interactive() -> bool {
    io::stdout().is_terminal()
}

/// Whether escape sequences suit a stream.
fn colours(terminal: bool) -> bool {
    terminal && colours_wanted(|name| std::env::var_os(name))
}

/// Whether the user wants colours on a terminal.
///
/// * `variable`: the environment. <https://no-color.org> and `TERM=dumb` are obeyed.
fn colours_wanted(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    variable("NO_COLOR").is_none_or(|value| value.is_empty())
        && variable("TERM").is_none_or(|term| term != "dumb")
}

/// `text` as the word in front of an error, when standard error is a terminal.
pub fn paint_error(text: &str) -> String {
    paint(text, "1;31")
}

/// `text` as the word in front of a warning, when standard error is a terminal.
pub fn paint_warning(text: &str) -> String {
    paint(text, "1;33")
}

/// `text` in a colour, when standard error is a terminal.
fn paint(text: &str, code: &str) -> String {
    if colours(io::stderr().is_terminal()) {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// `text` in bold, when standard output is a terminal.
pub fn bold(text: &str) -> String {
    if colours(is_interactive()) { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
}

/// Text from an image, without anything that a terminal would obey.
pub fn visible(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}

/// The same for text of several lines, which stay.
pub fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}

/// Standard output of a command whose result is text.
#[derive(Debug)]
pub struct Results {
    out: BufWriter<StdoutLock<'static>>,
}

impl Results {
    /// Locks standard output for this command.
    pub fn lock() -> Results {
        Results { out: BufWriter::with_capacity(64 << 10, io::stdout().lock()) }
    }

    /// Writes what is still buffered.
    pub fn finish(mut self) -> Result<(), Failure> {
        ended(self.out.flush())
    }
}

impl Write for Results {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// What a write of results means: a reader that went away has what it wanted, everything else is a
/// failure, since a script would take half a result for the whole.
pub fn ended(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => {
            Err(Failure::new(Exit::General, format!("cannot write the result: {}", words(&error))))
        }
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
