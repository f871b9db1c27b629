//! A long operation in the foreground: its way shown to people, its end by a signal.
//!
//! Promises: the first SIGINT, SIGTERM or SIGHUP asks the operation to end between two steps, so
//! every image stays sound; the second ends the process at once, which the order of our writes
//! survives like a power failure. SIGUSR1 prints how far it is. Showing never fails and never slows
//! the operation: a thread of its own looks at atomics.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::signals::{Actions, Phase, Watcher};
use ringdisk_daemon::terminal;
use ringdisk_disk::Progress;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::emulate_default_handler;

/// How often the display looks.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// An operation that is done sooner than this shows no bar.
const SHOW_AFTER: Duration = Duration::from_millis(400);

/// Least step of the lines of `-p`, percent; qemu-img's.
const STEP_PERCENT: f64 = 1.0;

/// What an operation shows of its way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Showing {
    /// Show the progress also where standard error is no terminal.
    pub progress: bool,
    /// Print nothing but errors.
    pub quiet: bool,
}

impl Showing {
    /// Nothing but errors.
    pub const QUIET: Showing = Showing { progress: false, quiet: true };
}

/// A running operation.
#[derive(Debug)]
pub struct Operation {
    progress: Arc<Progress>,
    watcher: Watcher,
    display: Option<Display>,
}

/// How the progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Nothing,
    /// One line of a terminal that is drawn anew.
    Bar,
    /// `    (12.00/100%)` on standard output, as qemu-img prints it.
    Lines,
}

impl Style {
    fn choose(wanted: Showing) -> Style {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        match (wanted.quiet, io::stderr().is_terminal() && !dumb, wanted.progress) {
            (true, _, _) => Style::Nothing,
            (_, true, _) => Style::Bar,
            (_, _, true) => Style::Lines,
            _ => Style::Nothing,
        }
    }
}

impl Operation {
    /// Watches for signals, and shows the progress from now on.
    ///
    /// * `what`: shown in front of the bar.
    ///
    /// Errors: those of making the threads.
    pub fn start(what: &str, showing: impl Into<Showing>) -> Result<Operation, Failure> {
        let progress = Arc::new(Progress::new());
        let asked = AtomicBool::new(false);
        let (for_stop, for_print) = (Arc::clone(&progress), Arc::clone(&progress));
        let actions = Actions {
            stop: Box::new(move |signal| {
                if asked.swap(true, Ordering::Relaxed) {
                    die_by(signal);
                }
                for_stop.cancel();
            }),
            print: Box::new(move || terminal::say_error(line(for_print.fraction()))),
        };
        let watcher = Watcher::start(Phase::Serving(actions))
            .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))?;
        let style = Style::choose(showing.into());
        let display =
            (style != Style::Nothing).then(|| Display::start(what, style, &progress)).flatten();
        Ok(Operation { progress, watcher, display })
    }

    /// What the operation counts in, and looks at to see whether it shall end.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Ends the display. An error after a signal becomes an end by that signal.
    ///
    /// * `sound`: what state the images are in when the operation was given up, for users.
    pub fn end<T>(self, result: Result<T, Failure>, sound: &str) -> Result<T, Failure> {
        if let Some(display) = self.display {
            display.end(result.is_ok());
        }
        self.watcher.enter(Phase::Ending);
        match (self.watcher.stopped_by(), result) {
            (Some(signal), Err(failure)) => {
                tracing::debug!("ended with: {}", failure.message());
                // Something else may have gone wrong beside the signal, and then nobody knows that.
                let was_given_up = failure.exit == Exit::General;
                let left = if was_given_up { sound } else { failure.message() };
                let stopped = Failure::new(Exit::General, format!("stopped by {signal}; {left}"));
                Err(stopped.by_signal(number(signal)))
            }
            (_, result) => result,
        }
    }
}

/// The number of a signal that [`Watcher`] names.
fn number(name: &str) -> i32 {
    match name {
        "SIGTERM" => SIGTERM,
        "SIGINT" => SIGINT,
        _ => SIGHUP,
    }
}

/// Ends the process as a signal that [`Watcher`] names does.
pub fn die_by(signal: &str) -> ! {
    end_by_signal(number(signal))
}

/// Ends the process as this signal does, so that a shell sees why; where the signal cannot (the
/// first process of a container), with 128 and its number.
pub fn end_by_signal(signal: i32) -> ! {
    let _ = emulate_default_handler(signal);
    std::process::exit(128 + signal)
}

/// The line that qemu-img prints.
fn line(fraction: f64) -> String {
    format!("    ({:.2}/100%)", fraction * 100.0)
}

/// The thread that shows.
#[derive(Debug)]
struct Display {
    stop: Sender<bool>,
    thread: JoinHandle<()>,
}

impl Display {
    fn start(what: &str, style: Style, progress: &Arc<Progress>) -> Option<Display> {
        let (stop, stopped) = channel();
        let (what, progress) = (what.to_owned(), Arc::clone(progress));
        let thread = std::thread::Builder::new()
            .name(String::from("progress"))
            .spawn(move || match style {
                Style::Bar => bar(&what, &progress, &stopped),
                _ => lines(&progress, &stopped, &mut io::stdout()),
            })
            .ok()?;
        Some(Display { stop, thread })
    }

    fn end(self, done: bool) {
        let _ = self.stop.send(done);
        let _ = self.thread.join();
    }
}

/// Waits for the next look; `Some` at the end, with whether all was done.
fn wait(stopped: &Receiver<bool>, time: Duration) -> Option<bool> {
    match stopped.recv_timeout(time) {
        Ok(done) => Some(done),
        Err(RecvTimeoutError::Disconnected) => Some(false),
        Err(RecvTimeoutError::Timeout) => None,
    }
}

fn bar(what: &str, progress: &Progress, stopped: &Receiver<bool>) {
    if wait(stopped, SHOW_AFTER).is_some() {
        return;
    }
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let text = "{prefix} [{bar:30}] {percent:>3}%  {binary_bytes} of {binary_total_bytes}, \
                {binary_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(text) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_owned());
    while wait(stopped, POLL_INTERVAL).is_none() {
        bar.set_length(progress.total().0);
        bar.set_position(progress.done().0);
    }
    bar.finish_and_clear();
}

fn lines(progress: &Progress, stopped: &Receiver<bool>, out: &mut impl Write) {
    let mut print = |fraction: f64, end: &str| {
        let _ = write!(out, "{}{end}", line(fraction)).and_then(|()| out.flush());
    };
    let mut shown = 0.0;
    print(0.0, "\r");
    let done = loop {
        if let Some(done) = wait(stopped, POLL_INTERVAL) {
            break done;
        }
        let now = progress.fraction();
        if (now - shown) * 100.0 >= STEP_PERCENT {
            shown = now;
            print(now, "\r");
        }
    };
    print(if done { 1.0 } else { progress.fraction() }, "\n");
}

#[cfg(test)]
mod tests {
    use ringdisk_disk::Bytes;

    use super::*;

    #[test]
    fn lines_are_those_of_qemu_img() {
        let progress = Progress::new();
        progress.set_total(Bytes(200));
        progress.set_done(Bytes(100));
        let (stop, stopped) = channel();
        let mut out = Vec::new();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(POLL_INTERVAL * 3);
            stop.send(true).expect("send");
        });
        lines(&progress, &stopped, &mut out);
        thread.join().expect("no panic");
        let text = String::from_utf8(out).expect("text");
        assert_eq!(text, "    (0.00/100%)\r    (50.00/100%)\r    (100.00/100%)\n");
    }
}
