//! The terminal of `ringdisk top`.
//!
//! Promises: the terminal is as it was when this returns, when it panics, and after SIGTERM or a
//! hang-up; a process that does not answer holds up samples, not keys; a terminal of another size
//! is drawn anew at once. The terminal is never asked anything, so one that does not answer does
//! not matter.

use std::io::{self, Stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{Clear, ClearType};
use ratatui::layout::{Rect, Size};
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::metrics::Sample;
use ringdisk_disk::Progress;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::tcgetwinsize;

use super::state::State;
use super::{Options, POLL_INTERVAL, view};

/// Size of a terminal that does not say its own (a serial line).
const UNKNOWN: Size = Size { width: 80, height: 24 };

/// Shows it until the user ends it, or as often as was asked for.
///
/// * `progress`: cancelled by a signal.
///
/// Errors: the terminal cannot be used.
pub(super) fn run(options: &Options, progress: &Progress) -> Result<(), Failure> {
    let shown = Screen::open().and_then(|mut screen| live(options, progress, &mut screen));
    match shown {
        // The terminal hung up: there is nobody to tell.
        Err(_) if progress.is_cancelled() => Ok(()),
        shown => shown.map_err(|error| {
            Failure::system("cannot use the terminal", &error, Exit::General)
                .hint("ringdisk top --plain")
        }),
    }
}

fn live(options: &Options, progress: &Progress, screen: &mut Screen) -> io::Result<()> {
    let mut state = State::new(options.sort, &options.filter, options.every);
    let every_ms = Arc::new(AtomicU64::new(millis(options.every)));
    let samples = sampler(Arc::clone(&every_ms))?;
    let mut before: Option<(Vec<Sample>, Instant)> = None;
    let mut left = options.count;
    screen.draw(|frame| view::draw(frame, &state))?;
    while left != Some(0) && !progress.is_cancelled() {
        let mut is_changed = screen.is_resized();
        match samples.try_recv() {
            Ok((now, at)) => {
                if let Some((before, since)) = &before {
                    state.take(before, &now, at.duration_since(*since).as_secs_f64());
                    left = left.map(|left| left - 1);
                    is_changed = true;
                }
                before = Some((now, at));
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Err(io::Error::other("no samples")),
        }
        if !wait_for_keys(if is_changed { Duration::ZERO } else { POLL_INTERVAL })? {
            return Ok(());
        }
        while event::poll(Duration::ZERO)? {
            is_changed = true;
            let key = match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => key,
                _ => continue,
            };
            if !state.key(key) {
                return Ok(());
            }
            every_ms.store(millis(state.every), Ordering::Relaxed);
        }
        if is_changed {
            screen.draw(|frame| view::draw(frame, &state))?;
        }
    }
    Ok(())
}

/// Waits for keys. `false`: the terminal has gone; crossterm would read its end again and again.
fn wait_for_keys(limit: Duration) -> io::Result<bool> {
    let keyboard = rustix::stdio::stdin();
    let mut waits = [PollFd::new(&keyboard, PollFlags::IN)];
    match poll(&mut waits, Timespec::try_from(limit).ok().as_ref()) {
        Ok(_) => Ok(!waits[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// A thread that takes samples, until nobody waits for them.
///
/// * `every_ms`: the interval; looked at while the thread waits.
///
/// Errors: no thread.
fn sampler(every_ms: Arc<AtomicU64>) -> io::Result<Receiver<(Vec<Sample>, Instant)>> {
    let (send, receive) = channel();
    std::thread::Builder::new().name(String::from("samples")).spawn(move || {
        loop {
            let begun = Instant::now();
            if send.send((super::samples(), Instant::now())).is_err() {
                return;
            }
            while let Some(left) = Duration::from_millis(every_ms.load(Ordering::Relaxed))
                .checked_sub(begun.elapsed())
                .filter(|left| !left.is_zero())
            {
                std::thread::sleep(left.min(POLL_INTERVAL));
            }
        }
    })?;
    Ok(receive)
}

/// The terminal while it is ours.
struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    size: Size,
}

impl Screen {
    /// Errors: those of the terminal, which is as it was then.
    fn open() -> io::Result<Screen> {
        let begun = ratatui::try_init().and_then(|_| {
            // An area of fixed size: `Terminal` asks a terminal where its cursor is when that has
            // changed its size, and waits for the answer.
            let size = size();
            execute!(io::stdout(), Hide)?;
            Ok(Screen { terminal: terminal(size)?, size })
        });
        begun.inspect_err(|_| restore())
    }

    fn is_resized(&self) -> bool {
        size() != self.size
    }

    fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let now = size();
        if now != self.size {
            self.terminal = terminal(now)?;
            self.size = now;
            execute!(io::stdout(), Clear(ClearType::All))?;
        }
        self.terminal.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn terminal(size: Size) -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    let viewport = Viewport::Fixed(Rect::new(0, 0, size.width, size.height));
    let backend = CrosstermBackend::new(io::stdout());
    Terminal::with_options(backend, TerminalOptions { viewport })
}

fn size() -> Size {
    let size = tcgetwinsize(rustix::stdio::stdout()).ok();
    let size = size.filter(|size| size.ws_col > 0 && size.ws_row > 0);
    size.map_or(UNKNOWN, |size| Size { width: size.ws_col, height: size.ws_row })
}

/// Puts the terminal back; one that has gone needs nothing.
fn restore() {
    let _ = execute!(io::stdout(), Show);
    let _ = ratatui::try_restore();
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_panic_gives_the_terminal_back_before_its_message() {
        let us = std::env::current_exe().expect("this program");
        let body = "top::screen::tests::panics_on_the_screen";
        let script = format!("{} --exact {body} --ignored --nocapture; stty -a", us.display());
        let mut terminal = Command::new("script");
        terminal.args(["-qec", &script, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null());
        let output = terminal.output().expect("script of util-linux");
        let text = String::from_utf8_lossy(&output.stdout);
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words:?}: {text}"));
        assert!(at("\u{1b}[?1049h") < at("\u{1b}[?1049l"));
        assert!(at("\u{1b}[?1049l") < at("the screen panics"));
        assert!(text.contains("\u{1b}[?25h"), "the cursor: {text}");
        assert!(text.contains(" icanon") && text.contains(" echo "), "{text}");
    }

    #[test]
    #[ignore = "run by a_panic_gives_the_terminal_back_before_its_message"]
    fn panics_on_the_screen() {
        let _screen = Screen::open().expect("a terminal");
        panic!("the screen panics");
    }
}
