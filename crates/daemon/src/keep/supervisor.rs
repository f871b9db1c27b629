//! The main thread of a helper process that keeps what outlives a server: a mount, or disks of
//! virtual machines (`--keep-mount`, `serve --keep`).
//!
//! Promises: the helper process makes no ring and touches no request: it holds descriptors, starts
//! the server, passes signals on to it, and sleeps. For the tasks of each server
//! ([`crate::helper`]) it has a thread ([`TaskThread`]), which touches nothing that is held. When
//! the server is killed or panics, the helper process starts another one, up to 5 times in 10 s of
//! serving (the time before a server serves does not count, so that servers cannot die at their
//! start for ever). After that, and when a server cannot start, the helper process ends what it
//! holds ([`Held`]), so that clients get errors and none hangs. It ends with the code of the
//! server, or with 7 when it gave up.
//!
//! The helper process knows descriptors by name only. After the start it takes and closes only
//! descriptors that are named exactly as [`LATE`] says, at most [`Held::late_max`] of each disk:
//! the server that gives them is confined, and an attacker may have taken it over. Other threads
//! close them ([`Closer`]), since a close may wait for the process that made the descriptor.
//!
//! [`LATE`]: super::held::LATE

mod parked;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::closer::Closer;
use super::forwarded_signals::Signals;
use super::held::Held;
use super::link::{self, Received};
use super::task_thread::{Line, TaskThread};
use crate::background::Background;
use crate::failure::{Exit, Failure};
use crate::io_flusher;
use crate::notify::{HANDED_OVER, IN_USE, Notify, TOOK_OVER, Word, watch};
use crate::pidfile::Pidfile;
use crate::stopping::{Asked, Insist};
use crate::terminal;

use parked::right_of;

/// Most restarts within [`WINDOW`] of serving; after them the supervisor gives up.
const RESTARTS_MAX: usize = 5;
const WINDOW: Duration = Duration::from_secs(10);
/// Time that a new server has to install its signal handlers. A signal that comes earlier would
/// kill it instead of stopping it.
const LISTENS: Duration = Duration::from_secs(2);
/// Attempts to start the next server, with [`SPAWN_PAUSE`] between them: 2 s.
const SPAWNS_MAX: usize = 10;
const SPAWN_PAUSE: Duration = Duration::from_millis(200);
/// Most messages that the supervisor reads before it looks for signals again.
const MESSAGES_MAX: usize = 256;
/// Exit code of a Rust program whose main thread has panicked.
const PANICKED: i32 = 101;

/// Starts, watches and restarts servers, and holds descriptors for them.
struct Supervisor<'a> {
    held: &'a mut dyn Held,
    /// Working directory of new servers.
    directory: PathBuf,
    /// Closes descriptors that belong to no disk.
    closer: Closer,
    /// Closes descriptors of one disk each.
    closers: Vec<Closer>,
    /// The user was warned that descriptors of the server are not kept.
    has_refused: bool,
    signals: Signals,
    manager: Notify,
    parked: link::Named,
    /// The server has parked all descriptors of its start. An attacker may have sent what comes
    /// later.
    is_parked: bool,
    pidfile_path: Option<PathBuf>,
    pidfile: Option<Pidfile>,
    background: Option<Background>,
    /// `--upgrade`: another server serves until this one takes over.
    is_upgrade: bool,
    /// The predecessor has handed over: its mount or disks are held here.
    has_taken: bool,
    /// The present server says that it has handed over to a successor.
    is_given: bool,
    /// Disks with an eventfd for the right to go on ([`Succession`]).
    rights: Vec<usize>,
    is_ready: bool,
    /// A signal has asked for a stop.
    is_stopping: bool,
    /// A signal has asked for the end at once.
    is_at_once: bool,
    /// Counts the signals that ask for a stop.
    insist: Insist,
    /// The present server has said that it stops.
    stops: bool,
    /// When the present server began to serve.
    serves_since: Option<Instant>,
    /// How long all servers before it have served together.
    served: Duration,
    /// [`Supervisor::served`] at each restart.
    restarts: VecDeque<Duration>,
    /// Set where a service manager has a watchdog.
    watch: Option<Watch>,
}

/// The watchdog of the service manager: this process sends its signs of life, and expects signs of
/// life from the server.
struct Watch {
    /// The manager's timeout.
    time: Duration,
    /// When the next poll is due.
    next: Instant,
    /// Polls since the last sign of life of the server. Not a time: time also passes while this
    /// process is stopped, and says nothing about the server then.
    polls: u32,
    /// The server was told to end.
    is_over: bool,
}

/// Polls within the manager's timeout. A server that has sent no sign of life during all of them is
/// killed.
const POLLS: u32 = 4;

/// A running server.
struct Serving {
    /// Our end of the socket.
    socket: OwnedFd,
    child: Child,
    /// `None`: it has to start a helper process of its own.
    tasks: Option<TaskThread>,
}

/// What the supervisor does after the end of a server.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Starts another server.
    Again,
    /// Ends, with this exit code.
    End(u8),
    /// Gives up.
    GiveUp,
}

/// Keeps a mount or disks until their end. Returns the exit code.
///
/// * `pidfile`: where this process writes its pid.
/// * `held`: the mount or the disks.
/// * `is_upgrade`: the server takes them over from another server.
///
/// Errors: the serving process cannot be started; it died too often.
pub fn run(
    pidfile: Option<&Path>,
    held: &mut dyn Held,
    background: Option<Background>,
    is_upgrade: bool,
) -> Result<u8, Failure> {
    // Starting a process takes memory, and must not wait for memory that is written to this very
    // mount.
    io_flusher::become_one_if(true);
    let noun = held.noun();
    let mut supervisor = Supervisor::new(pidfile, held, background, is_upgrade)?;
    loop {
        let (status, tasks) = supervisor.serve()?;
        // A process that served and ended by itself has taken its mount away.
        let has_served = supervisor.serves_since.is_some();
        let result = match supervisor.next(status) {
            // Also after the last restart: a successor may have claimed it by now.
            Next::Again | Next::GiveUp if supervisor.is_ours() && !supervisor.goes_on() => {
                terminal::note(format_args!("the {noun} is served by another process"));
                supervisor.leave();
                Ok(Exit::Clean.code())
            }
            Next::Again => {
                let how = how(status);
                terminal::warn(format_args!(
                    "the serving process {how}; another one goes on with the {noun}"
                ));
                supervisor.manager.status(&format!("the serving process {how}; starting another"));
                continue;
            }
            Next::End(code) if supervisor.is_given => {
                if supervisor.is_claimed_soon() || !supervisor.goes_on() {
                    supervisor.leave();
                    Ok(code)
                } else {
                    terminal::warn(format_args!(
                        "the process that took the {noun} over was killed before it could serve; \
                         another one goes on here"
                    ));
                    continue;
                }
            }
            Next::End(code) => {
                supervisor.end(has_served);
                Ok(code)
            }
            Next::GiveUp => Err(supervisor.give_up(status)),
        };
        let _ = tasks.as_ref().map(TaskThread::finish);
        return result;
    }
}

/// The failure of a start that cannot keep anything.
fn cannot(noun: &str, error: &io::Error) -> Failure {
    Failure::system(format!("cannot keep a {noun}"), error, Exit::General)
}

/// A closing thread for each disk.
fn closers(held: &dyn Held) -> io::Result<Vec<Closer>> {
    (0..held.disks()).map(|_| Closer::start()).collect()
}

/// Whether descriptors were lost because this process has reached its limit of descriptors.
fn is_lost(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error())
}

/// How a process ended, as text for users.
fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(PANICKED)) => String::from("panicked"),
        (None, code) => format!("ended with {}", code.unwrap_or(0)),
    }
}

impl<'a> Supervisor<'a> {
    /// Handles signals from now on.
    ///
    /// * `pidfile`: where this process will write its pid.
    ///
    /// Errors: the pid file cannot be had; the system has no thread, no descriptor.
    fn new(
        pidfile: Option<&Path>,
        held: &'a mut dyn Held,
        background: Option<Background>,
        is_upgrade: bool,
    ) -> Result<Supervisor<'a>, Failure> {
        let noun = held.noun();
        let cannot = |error: io::Error| cannot(noun, &error);
        let directory = std::env::current_dir().map_err(cannot)?;
        let pidfile_path = pidfile.map(std::path::absolute).transpose().map_err(cannot)?;
        if let Some(path) = &pidfile_path {
            Pidfile::check_for(path, is_upgrade)?;
        }
        Ok(Supervisor {
            directory,
            signals: Signals::watch().map_err(cannot)?,
            manager: Notify::from_environment(),
            parked: Vec::new(),
            is_parked: false,
            closer: Closer::start().map_err(cannot)?,
            closers: closers(held).map_err(cannot)?,
            has_refused: false,
            held,
            pidfile_path,
            pidfile: None,
            background,
            is_upgrade,
            has_taken: false,
            is_given: false,
            rights: Vec::new(),
            is_ready: false,
            is_stopping: false,
            is_at_once: false,
            insist: Insist::default(),
            stops: false,
            serves_since: None,
            served: Duration::ZERO,
            restarts: VecDeque::new(),
            watch: watch::wanted().map(|time| Watch {
                time,
                next: Instant::now(),
                polls: 0,
                is_over: false,
            }),
        })
    }
}

impl Supervisor<'_> {
    /// Runs a server until its end. Returns its exit status, and the thread for its tasks.
    ///
    /// Errors: it cannot be started; the pid file cannot be made. What is held has ended then.
    fn serve(&mut self) -> Result<(ExitStatus, Option<TaskThread>), Failure> {
        let Serving { socket, mut child, tasks } = match self.spawn() {
            Ok(started) => started,
            Err(error) => {
                self.end(false);
                let hint = format!("/proc must be mounted for {}", self.held.option());
                return Err(cannot(self.held.noun(), &error).hint(hint));
            }
        };
        match self.attend(&socket, &mut child) {
            Ok(status) => Ok((status, tasks)),
            Err(failure) => {
                let _ = child.kill();
                let _ = child.wait();
                self.end(false);
                Err(failure)
            }
        }
    }

    /// Starts a server. Tries again where memory or processes are short, which may have killed the
    /// server before.
    ///
    /// Errors: those of [`link::spawn`].
    fn spawn(&self) -> io::Result<Serving> {
        let mut tries = if self.is_ready { SPAWNS_MAX } else { 1 };
        loop {
            tries -= 1;
            match self.start() {
                Err(error) if tries > 0 => {
                    tracing::warn!(
                        "no process to go on with the {}: {error}; it is tried again",
                        self.held.noun()
                    );
                    std::thread::sleep(SPAWN_PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Starts a server, and the thread for its tasks.
    ///
    /// Errors: those of [`link::spawn`].
    fn start(&self) -> io::Result<Serving> {
        // Without a socket or a thread for its tasks the server starts a helper process.
        let (line, theirs) = Line::new().ok().unzip();
        let (socket, child) = link::spawn(&self.directory, &self.parked, theirs)?;
        let tasks = line.and_then(|line| line.help(child.id()).ok());
        Ok(Serving { socket, child, tasks })
    }

    /// Reads messages of the server, and passes signals on to it, until its end.
    ///
    /// Errors: the pid file cannot be made.
    fn attend(&mut self, socket: &OwnedFd, child: &mut Child) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(child);
        let mut is_open = true;
        let begun = Instant::now();
        // The server sends its first message when its signal handlers are installed.
        let mut listens = false;
        let mut to_pass_on = Vec::new();
        (self.stops, self.is_given) = (false, false);
        if let Some(watch) = &mut self.watch {
            watch.is_over = false;
        }
        if self.is_stopping {
            to_pass_on.push(Signal::TERM);
        }
        // The server before may have died before it got the signal.
        if self.is_at_once {
            to_pass_on.push(Signal::USR2);
        }
        loop {
            {
                let mut wanted = vec![PollFd::new(&self.signals.wake, PollFlags::IN)];
                if is_open {
                    wanted.push(PollFd::new(socket, PollFlags::IN));
                }
                let listens = LISTENS.saturating_sub(begun.elapsed());
                let listens = Some(listens).filter(|_| !to_pass_on.is_empty());
                let look = self.watch.as_ref();
                let look = look.map(|it| it.next.saturating_duration_since(Instant::now()));
                let limit = listens.into_iter().chain(look).min();
                let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
                // A signal has interrupted the wait, and is handled in the next turn.
                let _ = poll(&mut wanted, limit.as_ref());
            }
            to_pass_on.extend(self.came());
            // Checked before the messages are read: after its end the server sends none.
            let ended = child.try_wait();
            // While the server lives, signals and its end are looked at between messages; the
            // messages of one that has ended are finite.
            let mut turn = if matches!(ended, Ok(None)) { MESSAGES_MAX } else { usize::MAX };
            while is_open && turn > 0 {
                turn -= 1;
                match link::receive(socket.as_fd()) {
                    Ok(Received::Message(text, descriptors)) => {
                        listens = true;
                        self.hear(&text, descriptors)?;
                    }
                    Ok(Received::Nothing) => break,
                    Ok(Received::End) => is_open = false,
                    // An attacker in the server may have sent them; all that was parked before is
                    // there.
                    Err(error) if is_lost(&error) => self.refuse("more descriptors than it may"),
                    Err(error) => {
                        let doing = "what the serving process says";
                        return Err(Failure::system(doing, &error, Exit::General));
                    }
                }
            }
            if listens || begun.elapsed() >= LISTENS {
                for signal in to_pass_on.drain(..).filter(|_| matches!(ended, Ok(None))) {
                    let _ = kill_process(pid, signal);
                }
            }
            match ended {
                Ok(Some(status)) => return Ok(status),
                Ok(None) => self.look(pid),
                Err(error) => {
                    return Err(Failure::system("the serving process", &error, Exit::General));
                }
            }
        }
    }

    /// The signals to pass on. A second one that asks for the end becomes SIGUSR2: the server may
    /// have got the first one itself, too, from a terminal or a service manager that signals the
    /// whole group, and cannot count them.
    fn came(&mut self) -> Vec<Signal> {
        let mut all = Vec::new();
        for (signal, stops) in self.signals.take() {
            self.is_stopping |= stops;
            match stops.then(|| self.insist.count(signal != Signal::HUP)) {
                None | Some(Asked::First) => all.push(signal),
                Some(Asked::Echo) => {}
                Some(Asked::Again) => {
                    self.is_at_once = true;
                    all.push(Signal::USR2);
                }
            }
        }
        all
    }

    /// Sends a sign of life to the manager when it is due, and kills a server that has sent none:
    /// the next server goes on.
    fn look(&mut self, server: Pid) {
        let serves = self.serves_since.is_some();
        let Some(watch) = self.watch.as_mut().filter(|it| it.next <= Instant::now()) else {
            return;
        };
        watch.next = Instant::now() + watch.time / POLLS;
        self.manager.say(Word::Alive, "");
        // A server that still opens its images, or waits for their locks, has no limit.
        watch.polls = if serves { watch.polls + 1 } else { 0 };
        if watch.polls > POLLS && !std::mem::replace(&mut watch.is_over, true) {
            terminal::warn(format_args!(
                "the serving process (pid {server}) does not say that it lives for {:.1} s: it is \
                 killed",
                watch.time.as_secs_f64(),
                server = server.as_raw_nonzero(),
            ));
            let _ = kill_process(server, Signal::KILL);
        }
    }

    /// Carries out a message of the server.
    ///
    /// Errors: the pid file cannot be made.
    fn hear(&mut self, text: &str, descriptors: Vec<OwnedFd>) -> Result<(), Failure> {
        let mut descriptors = descriptors;
        let value =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let status = value("STATUS").unwrap_or_default();
        if value("WATCHDOG").is_some() {
            if let Some(watch) = &mut self.watch {
                watch.polls = 0;
            }
        } else if value("FDSTORE").is_some() {
            let given = std::mem::take(&mut descriptors);
            self.park(value("FDNAME").unwrap_or_default(), given);
        } else if value("FDSTOREREMOVE").is_some() {
            self.let_go(value("FDNAME").unwrap_or_default());
        } else if value("BARRIER").is_some() {
            // The server waits for this answer before it is confined.
            if !self.is_parked && !self.parked.is_empty() {
                self.is_parked = true;
                self.rights = self.parked.iter().filter_map(|(name, _)| right_of(name)).collect();
            }
        } else if value("READY").is_some() {
            self.ready(status)?;
        } else if value("STOPPING").is_some() {
            self.stops = true;
            self.manager.stopping(status);
        } else if value(TOOK_OVER).is_some() {
            self.has_taken = true;
        } else if value(HANDED_OVER).is_some() {
            self.is_given = true;
        } else if value(IN_USE).is_some() {
            // The mount does not end with this server: the next one goes on, and stops, too.
            self.stops = false;
            self.is_stopping = true;
            self.manager.in_use(status);
        } else if !status.is_empty() {
            self.manager.status(status);
        }
        // Also the descriptor of a barrier.
        descriptors.into_iter().for_each(|descriptor| self.closer.close(descriptor));
        Ok(())
    }

    /// The mount or the disks have ended.
    ///
    /// * `is_removed`: the server has ended them.
    fn end(&mut self, is_removed: bool) {
        if !self.is_ours() || !self.goes_on() {
            return self.leave();
        }
        self.held.end(std::mem::take(&mut self.parked), is_removed);
        self.pidfile = None;
    }

    /// Whether this process owns what it holds: with `--upgrade`, once its server has taken over.
    fn is_ours(&self) -> bool {
        !self.is_upgrade || self.has_taken || self.is_ready
    }

    /// Leaves everything as it is: another process serves it.
    fn leave(&mut self) {
        // The end of this process closes them, and does not wait for other processes.
        std::mem::forget(std::mem::take(&mut self.parked));
        if let Some(pidfile) = self.pidfile.take() {
            pidfile.leave();
        }
    }

    /// Ends what is held, since no server can serve it. Returns the reason.
    fn give_up(&mut self, status: ExitStatus) -> Failure {
        let what = self.why(status);
        self.manager.stopping(&what);
        let was_ready = self.is_ready;
        self.end(false);
        if !was_ready {
            self.held.undo();
        }
        Failure::new(Exit::Halted, what).hint(self.held.remedy())
    }

    /// The server serves: writes the pid file, and reports to the manager and the foreground.
    fn ready(&mut self, status: &str) -> Result<(), Failure> {
        self.serves_since.get_or_insert_with(Instant::now);
        if self.is_ready {
            self.manager.status(status);
            return Ok(());
        }
        self.is_ready = true;
        terminal::serves();
        self.pidfile = Pidfile::create_for(self.pidfile_path.as_deref(), self.is_upgrade)?;
        self.manager.ready(status);
        if let Some(background) = self.background.take() {
            background.ready();
        }
        Ok(())
    }

    /// What to do after the end of a server with this status.
    fn next(&mut self, status: ExitStatus) -> Next {
        self.served += self.serves_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        let died = status.signal().is_some() || status.code() == Some(PANICKED);
        match status.code().map(u8::try_from) {
            Some(Ok(code)) if !died => return Next::End(code),
            _ if !(self.is_ready || self.has_taken) || self.stops || self.parked.is_empty() => {
                return Next::GiveUp;
            }
            _ => {}
        }
        let now = self.served;
        while self.restarts.front().is_some_and(|first| now.saturating_sub(*first) > WINDOW) {
            self.restarts.pop_front();
        }
        if self.restarts.len() >= RESTARTS_MAX {
            return Next::GiveUp;
        }
        self.restarts.push_back(now);
        Next::Again
    }

    /// The failure that says why the supervisor gives up.
    fn why(&self, status: ExitStatus) -> String {
        let (how, noun) = (how(status), self.held.noun());
        if !self.is_ready {
            format!("the serving process {how} before the {noun} was ready")
        } else if self.stops {
            format!(
                "the serving process {how} while it was stopping; requests in flight ended with \
                 errors"
            )
        } else {
            let seconds = WINDOW.as_secs();
            format!(
                "the serving process {how}, and {RESTARTS_MAX} others before it within {seconds} s \
                 of serving: the {noun} is given up, and {}",
                self.held.loss()
            )
        }
    }
}

#[cfg(test)]
mod tests;
