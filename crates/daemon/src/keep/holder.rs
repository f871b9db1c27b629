//! The small parent that keeps a mount.
//!
//! Promises: it opens no image, makes no ring and touches no request: it holds descriptors, starts
//! the process that serves, passes signals on to it, and sleeps. When that one is killed or panics
//! it starts another, up to 5 times in 10 s of serving (so that one that dies before it serves
//! cannot go on dying for ever, however slowly); after that, and when the next one cannot start, it
//! ends the mount, so that clients get errors and nobody hangs. It ends with the code of the
//! process that served, or with 7 when it gave up.
//!
//! One thread.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_fuse::kept::{Parked, is_over};
use ringdisk_fuse::mount::{self, Mount, Unmount, mountpoint};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{flag, low_level::pipe};

use super::link::{self, Received};
use super::{ALIVE, ORIGIN, STATE, State};
use crate::background::Background;
use crate::failure::{Exit, Failure};
use crate::io_flusher;
use crate::mount_lock;
use crate::mountpoint::MountpointState;
use crate::new_file::NewFile;
use crate::notify::{IN_USE, Notify};
use crate::pidfile::Pidfile;
use crate::signals::is_ignored;
use crate::stopping::{Asked, Insist};
use crate::terminal;

/// So many new processes within [`WINDOW`] of serving; then the mount is given up.
const RESTARTS_MAX: usize = 5;
const WINDOW: Duration = Duration::from_secs(10);
/// How long a new process may take until it takes signals. One that comes earlier would kill it
/// instead of stopping it.
const LISTENS: Duration = Duration::from_secs(2);
/// How often a process that shall go on is tried to be started, with [`SPAWN_PAUSE`] in between: 2
/// s.
const SPAWNS_MAX: usize = 10;
const SPAWN_PAUSE: Duration = Duration::from_millis(200);
/// What a Rust program ends with after a panic of its main thread.
const PANICKED: i32 = 101;

/// The signals that are passed on, with what has to be noted of each.
const PASSED_ON: [(i32, Signal, bool); 4] = [
    (SIGTERM, Signal::TERM, true),
    (SIGINT, Signal::INT, true),
    (SIGHUP, Signal::HUP, true),
    (SIGUSR1, Signal::USR1, false),
];

/// Signals that have come.
struct Signals {
    /// Readable when one has.
    wake: UnixStream,
    came: Vec<(Arc<AtomicBool>, Signal, bool)>,
}

impl Signals {
    fn watch() -> io::Result<Signals> {
        let (wake, write) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        write.set_nonblocking(true)?;
        let mut came = Vec::new();
        for (number, signal, stops) in PASSED_ON {
            if number == SIGHUP && is_ignored(SIGHUP) {
                continue;
            }
            let flag = Arc::new(AtomicBool::new(false));
            // First the flag: who is woken finds it.
            flag::register(number, Arc::clone(&flag))?;
            pipe::register(number, write.try_clone()?)?;
            came.push((flag, signal, stops));
        }
        pipe::register(SIGCHLD, write)?;
        Ok(Signals { wake, came })
    }

    /// Those that came since the last call, and whether each asks for the end.
    fn take(&self) -> Vec<(Signal, bool)> {
        let mut bytes = [0; 64];
        while matches!(io::Read::read(&mut &self.wake, &mut bytes), Ok(1..)) {}
        let came = self.came.iter().filter(|(flag, ..)| flag.swap(false, Ordering::AcqRel));
        came.map(|(_, signal, stops)| (*signal, *stops)).collect()
    }
}

/// The keeping process.
struct Holder {
    signals: Signals,
    manager: Notify,
    parked: link::Named,
    /// All has been parked that will be: what comes later is from a process that may have been
    /// taken over.
    is_parked: bool,
    /// Where the mount was asked for. What the serving process says of it counts only for that
    /// place: it reads what others wrote, and is in a sandbox, which this one is not.
    mountpoint: Option<PathBuf>,
    /// What was there at first.
    before: MountpointState,
    pidfile_path: Option<PathBuf>,
    pidfile: Option<Pidfile>,
    background: Option<Background>,
    is_ready: bool,
    /// A stop was asked for.
    is_stopping: bool,
    /// The end at once was asked for.
    is_at_once: bool,
    /// The signals that asked for it.
    insist: Insist,
    /// The present process has said that it stops.
    stops: bool,
    /// Since when the present process serves.
    serves_since: Option<Instant>,
    /// For how long those before it have served.
    served: Duration,
    /// [`Holder::served`] at each new start.
    restarts: VecDeque<Duration>,
}

/// What follows from the end of the serving process.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Another one.
    Again,
    /// The mount is over, with this code.
    End(u8),
    /// It cannot go on.
    GiveUp,
}

/// Keeps a mount until its end. Gives the exit code.
///
/// * `pidfile`: where this process writes its pid.
///
/// Errors: the serving process cannot be started; it died too often.
pub fn run(
    pidfile: Option<&Path>,
    mountpoint: &Path,
    background: Option<Background>,
) -> Result<u8, Failure> {
    let cannot = |error: &io::Error| Failure::system("cannot keep a mount", error, Exit::General);
    // Starting a process takes memory, and must not wait for memory that is written to this very
    // mount.
    io_flusher::become_one_if(true);
    let directory = std::env::current_dir().map_err(|error| cannot(&error))?;
    let pidfile_path = pidfile.map(std::path::absolute).transpose();
    let pidfile_path = pidfile_path.map_err(|error| cannot(&error))?;
    if let Some(path) = &pidfile_path {
        Pidfile::check(path)?;
    }
    let mut holder = Holder {
        signals: Signals::watch().map_err(|error| cannot(&error))?,
        manager: Notify::from_environment(),
        parked: Vec::new(),
        is_parked: false,
        mountpoint: mountpoint::place(mountpoint).ok(),
        before: MountpointState::of(mountpoint),
        pidfile_path,
        pidfile: None,
        background,
        is_ready: false,
        is_stopping: false,
        is_at_once: false,
        insist: Insist::default(),
        stops: false,
        serves_since: None,
        served: Duration::ZERO,
        restarts: VecDeque::new(),
    };
    loop {
        let (socket, mut child) = match holder.spawn(&directory) {
            Ok(started) => started,
            Err(error) => {
                holder.end_mount(false);
                return Err(cannot(&error).hint("/proc must be mounted for --keep-mount"));
            }
        };
        let status = match holder.attend(&socket, &mut child) {
            Ok(status) => status,
            Err(failure) => {
                let _ = child.kill();
                let _ = child.wait();
                holder.end_mount(false);
                return Err(failure);
            }
        };
        // A process that served and ended by itself has taken its mount away.
        let has_served = holder.serves_since.is_some();
        match holder.next(status) {
            Next::Again => {
                let how = how(status);
                terminal::warn(format_args!(
                    "the serving process {how}; another one goes on with the mount"
                ));
                holder.manager.status(&format!("the serving process {how}; starting another"));
            }
            Next::End(code) => {
                holder.end_mount(has_served);
                return Ok(code);
            }
            Next::GiveUp => {
                let what = holder.why(status);
                holder.manager.stopping(&what);
                let was_ready = holder.is_ready;
                holder.end_mount(false);
                if !was_ready {
                    holder.before.restore();
                }
                return Err(Failure::new(Exit::Halted, what)
                    .hint("look at what it said before it died, then mount the image again"));
            }
        }
    }
}

/// How a process ended, for people.
fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(PANICKED)) => String::from("panicked"),
        (None, code) => format!("ended with {}", code.unwrap_or(0)),
    }
}

impl Holder {
    /// Starts a serving process. Where memory or processes are short (which may be what the one
    /// before it has died of) it tries again.
    ///
    /// Errors: those of [`link::spawn`].
    fn spawn(&self, directory: &Path) -> io::Result<(OwnedFd, Child)> {
        let mut tries = if self.is_ready { SPAWNS_MAX } else { 1 };
        loop {
            tries -= 1;
            match link::spawn(directory, &self.parked) {
                Err(error) if tries > 0 => {
                    tracing::warn!(
                        "no process to go on with the mount: {error}; it is tried again"
                    );
                    std::thread::sleep(SPAWN_PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Serves the serving process until its end.
    ///
    /// Errors: the pid file cannot be made.
    fn attend(&mut self, socket: &OwnedFd, child: &mut Child) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(child);
        let mut is_open = true;
        let begun = Instant::now();
        // The first thing that it says, it says when it takes signals.
        let mut listens = false;
        let mut to_pass_on = Vec::new();
        self.stops = false;
        if self.is_stopping {
            to_pass_on.push(Signal::TERM);
        }
        // The one before it may have died before it heard of it.
        if self.is_at_once {
            to_pass_on.push(Signal::USR2);
        }
        loop {
            {
                let mut wanted = vec![PollFd::new(&self.signals.wake, PollFlags::IN)];
                if is_open {
                    wanted.push(PollFd::new(socket, PollFlags::IN));
                }
                let limit = Timespec::try_from(LISTENS.saturating_sub(begun.elapsed())).ok();
                // Interrupted by a signal: that is what it waits for.
                let _ = poll(&mut wanted, limit.filter(|_| !to_pass_on.is_empty()).as_ref());
            }
            to_pass_on.extend(self.came());
            // Before its words are read: nothing is said after the end.
            let ended = child.try_wait();
            while is_open {
                match link::receive(socket.as_fd()) {
                    Ok(Received::Message(text, descriptors)) => {
                        listens = true;
                        self.hear(&text, descriptors)?;
                    }
                    Ok(Received::Nothing) => break,
                    Ok(Received::End) => is_open = false,
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
                Ok(None) => {}
                Err(error) => {
                    return Err(Failure::system("the serving process", &error, Exit::General));
                }
            }
        }
    }

    /// The signals to pass on. A second one that asks for the end becomes SIGUSR2: the serving
    /// process may have got the first one itself too, from a terminal or a service manager that
    /// signals the whole group, and cannot count them.
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

    /// Does what a message of the serving process says.
    ///
    /// Errors: the pid file cannot be made.
    fn hear(&mut self, text: &str, descriptors: Vec<OwnedFd>) -> Result<(), Failure> {
        let value =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let status = value("STATUS").unwrap_or_default();
        if value("FDSTORE").is_some() {
            if self.is_parked {
                tracing::warn!(
                    "the serving process gives descriptors after its start; they are not kept"
                );
                return Ok(());
            }
            let name = value("FDNAME").unwrap_or_default();
            self.parked.retain(|(kept, _)| kept != name);
            self.parked.extend(descriptors.into_iter().map(|fd| (name.to_owned(), fd)));
        } else if value("BARRIER").is_some() {
            // The one who parks waits for this, before it is confined.
            self.is_parked |= !self.parked.is_empty();
        } else if value("READY").is_some() {
            self.ready(status)?;
        } else if value("STOPPING").is_some() {
            self.stops = true;
            self.manager.stopping(status);
        } else if value(IN_USE).is_some() {
            // Its users do not lose it with this process: the next one goes on, and stops too.
            self.stops = false;
            self.is_stopping = true;
            self.manager.in_use(status);
        } else if !status.is_empty() {
            self.manager.status(status);
        }
        // A barrier's descriptor is closed by now.
        Ok(())
    }

    /// The mount answers.
    fn ready(&mut self, status: &str) -> Result<(), Failure> {
        self.serves_since.get_or_insert_with(Instant::now);
        if self.is_ready {
            self.manager.status(status);
            return Ok(());
        }
        self.is_ready = true;
        terminal::serves();
        self.pidfile = self.pidfile_path.as_deref().map(Pidfile::create).transpose()?;
        self.manager.ready(status);
        if let Some(background) = self.background.take() {
            background.ready();
        }
        Ok(())
    }

    /// What follows.
    fn next(&mut self, status: ExitStatus) -> Next {
        self.served += self.serves_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        let died = status.signal().is_some() || status.code() == Some(PANICKED);
        match status.code().map(u8::try_from) {
            Some(Ok(code)) if !died => return Next::End(code),
            _ if !self.is_ready || self.stops || self.parked.is_empty() => {
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

    /// Why the mount is given up.
    fn why(&self, status: ExitStatus) -> String {
        let how = how(status);
        if !self.is_ready {
            format!("the serving process {how} before the mount was ready")
        } else if self.stops {
            format!(
                "the serving process {how} while it was stopping; requests in flight ended with errors"
            )
        } else {
            let seconds = WINDOW.as_secs();
            format!(
                "the serving process {how}, and {RESTARTS_MAX} others before it within {seconds} s of serving: the mount is given up, and its \
                 clients get errors"
            )
        }
    }

    /// Takes the mount away if it is still there: its clients get errors. Then everything that was
    /// kept goes.
    ///
    /// * `is_removed`: the serving process has done so; its place and its number may be those of
    ///   another mount by now.
    fn end_mount(&mut self, is_removed: bool) {
        let parked = std::mem::take(&mut self.parked);
        let (mut first, mut alive, mut devices) = (None, None, Vec::new());
        for (name, descriptor) in parked {
            match name.as_str() {
                ORIGIN => first = State::sealed(&descriptor).ok(),
                STATE => {}
                ALIVE => alive = Some(File::from(descriptor)),
                _ => devices.push(descriptor),
            }
        }
        let parked = first.map(|first| (first.made, Parked { terms: first.terms(), devices }));
        let is_asked_for =
            |place: &Path| self.mountpoint.as_deref().is_none_or(|asked| asked == place);
        if let Some((made, Parked { terms, mut devices })) = parked
            .filter(|(_, parked)| is_asked_for(&parked.terms.mountpoint))
            .filter(|(_, parked)| !(is_removed && is_over(parked)))
            && let Some(device) = devices.pop()
        {
            // On kernels that do not say whose a descriptor is, the number that the process has
            // told at the start: another mount may have it by now.
            let is_known = mount::knows_its_connection(&device)
                || mount::abort_of(&terms.mountpoint, terms.connection).is_some();
            let mount = Mount::adopt(device, terms.mountpoint.clone(), terms.connection);
            let mut mount = if is_known { mount.take_over() } else { mount };
            if let Err(error) = mount.unmount(Unmount::Force) {
                tracing::warn!("{}", error.with_hint());
            }
            drop(devices);
            drop(mount);
            // What the serving process says of the file that was there before does not count.
            let made = made.filter(|_| !self.before.was_there());
            drop(made.map(|id| NewFile::adopt(&terms.mountpoint, id)));
        }
        if let Some(alive) = alive {
            mount_lock::release(&alive);
        }
        self.pidfile = None;
    }
}

#[cfg(test)]
mod tests;
