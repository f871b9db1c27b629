//! A mount, or disks of virtual machines, that outlive the process that serves them
//! (`--keep-mount`, `serve --keep`).
//!
//! Promises: a process that does not serve has every descriptor of the mount, and all else that a
//! successor needs; a successor that gets them goes on with that mount, and no request is lost.
//!
//! Which process keeps them ([`role`]):
//! - a service manager with a place for descriptors (`FDSTORE=1` of sd_notify(3)), which gives them
//!   to the next process it starts (`LISTEN_FDS`);
//! - else the helper process ([`supervisor`]): the parent of the server, which starts the next one
//!   itself and carries out the tasks of each ([`crate::helper`]).
//!
//! The server speaks to both in the same words (`notify.rs`); only the way back differs. Disks are
//! always kept by the helper process ([`disks`]): their descriptors come and go while they are
//! served.

mod closer;
pub mod disks;
mod forwarded_signals;
mod held;
mod held_mount;
pub mod jobs;
mod link;
pub mod sealed_state;
pub mod slots;
mod state;
pub mod succession;
pub mod supervisor;
mod task_thread;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use held::LATE;
pub use held_mount::HeldMount;
use jobs::KeptJobs;
pub use link::is_managed;
use ringdisk_fuse::kept::{Ended, Keep, Parked, ended};
use ringdisk_fuse::mount::inherited;
pub use state::{State, StateFile};
use succession::Succession;

use crate::control::jobs::HandedJob;
use crate::failure::{Exit, Failure};
use crate::helper::start::Role as Started;
use crate::mount_lock;
use crate::notify::{DESCRIPTORS, Notify, Word};
use crate::terminal;

const STATE: &str = "ringdisk-state";
const ORIGIN: &str = "ringdisk-origin";
const ALIVE: &str = "ringdisk-alive";
const DEVICE: &str = "ringdisk-fuse-";

/// What this process is.
#[derive(Debug)]
pub enum Role {
    /// It serves, and another process keeps the mount.
    Serves(Kept),
    /// It keeps the mount, and another one serves.
    Holds,
}

/// The descriptors of a mount whose process is gone.
#[derive(Debug)]
pub struct Found {
    /// What the mount was made with.
    first: State,
    state: StateFile,
    alive: Option<File>,
    devices: Vec<OwnedFd>,
    late: Vec<(u64, OwnedFd)>,
    right: Option<Succession>,
}

/// The serving side of a kept mount.
#[derive(Debug)]
pub struct Kept {
    /// The process that keeps the mount, which hears how we are.
    pub notify: Arc<Notify>,
    /// The helper process's socket: it ends with the helper process.
    helper: Option<OwnedFd>,
    state: StateFile,
    found: Option<Box<Resumed>>,
    /// Descriptors of the jobs of the process before, by their numbers.
    late: Vec<(u64, OwnedFd)>,
    /// To go on with the mount, where a process of ours keeps it.
    right: Option<Succession>,
    /// Names of what was parked, to be forgotten at the end.
    names: Vec<String>,
}

/// Who keeps the mount of `--keep-mount`.
///
/// * `needs_helper`: a service manager cannot start the next process: this one is to run in the
///   background, or takes the mount over from another one.
/// * `queues`: connections that the mount has at most, each with a descriptor.
///
/// Errors: `Unsupported` over io_uring; what was parked cannot be used.
pub fn role(needs_helper: bool, queues: usize) -> Result<Role, Failure> {
    if Started::Kept.is_ours() {
        let (notify, helper, parked) = link::enter("mount")?;
        return Ok(Role::Serves(Kept::new(notify, Some(helper), found(parked)?)?));
    }
    if Started::Kept.is_orphaned() {
        return Err(Failure::new(
            Exit::General,
            "the process that keeps the mount was gone before this one could serve it: the mount \
             has ended",
        ));
    }
    let notify = Notify::from_environment();
    let parked = inherited::take(DESCRIPTORS);
    let names: Vec<String> = parked.iter().map(|(name, _)| name.clone()).collect();
    let found = found(parked)?;
    if found.is_none() && !names.is_empty() {
        // A mount whose process died before it had parked everything. With the last descriptor it
        // ends, and a new one is made.
        names.iter().for_each(|name| notify.unstore(name));
        let _ = notify.barrier();
    }
    // What is kept stays where it is, whether or not there would be room for more.
    if found.is_none() && (needs_helper || !manager_keeps(queues)) {
        return Ok(Role::Holds);
    }
    Ok(Role::Serves(Kept::new(notify, None, found)?))
}

/// Whether a service manager has room for all our descriptors. `FDSTORE` is set by systemd 254 and
/// newer.
fn manager_keeps(queues: usize) -> bool {
    let Some(room) = std::env::var("FDSTORE").ok().and_then(|text| text.parse::<usize>().ok())
    else {
        return false;
    };
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return false;
    }
    let needed = queues + 3;
    if room < needed {
        terminal::warn(format_args!(
            "the service manager keeps {room} descriptors and the mount may need {needed}, so a \
             process of our own keeps them; \
             set FileDescriptorStoreMax={needed}"
        ));
    }
    room >= needed
}

/// Sorts parked descriptors out; `None`: there are none, or not all.
///
/// Errors: their state is of another version, or cannot be read.
fn found(parked: link::Named) -> Result<Option<Found>, Failure> {
    let (mut origin, mut state, mut alive, mut devices) = (None, None, None, Vec::new());
    let (mut late, mut right) = (Vec::new(), None);
    for (name, descriptor) in parked {
        let number = name.strip_prefix(LATE).and_then(|name| name.strip_prefix("0-"));
        match number.map(str::parse) {
            Some(Ok(succession::NUMBER)) => {
                right = Succession::of(descriptor).ok();
                continue;
            }
            Some(Ok(number)) => {
                late.push((number, descriptor));
                continue;
            }
            _ => {}
        }
        match name.strip_prefix(DEVICE).map(str::parse::<usize>) {
            Some(Ok(number)) => devices.push((number, descriptor)),
            _ if name == ORIGIN => origin = Some(descriptor),
            _ if name == STATE => state = Some(descriptor),
            _ if name == ALIVE => alive = Some(File::from(descriptor)),
            _ => tracing::debug!("a descriptor named '{name}' is not known"),
        }
    }
    let both = state.zip(origin).filter(|_| !devices.is_empty());
    let Some((state, origin)) = both else { return Ok(None) };
    devices.sort_by_key(|(number, _)| *number);
    let devices: Vec<OwnedFd> = devices.into_iter().map(|(_, device)| device).collect();
    let first = State::sealed(&origin)?;
    let is_whole = first.devices() == devices.len();
    let state = StateFile::open(state, first.clone())?;
    Ok(is_whole.then_some(Found { first, state, alive, devices, late, right }))
}

/// A mount to go on with.
#[derive(Debug)]
struct Resumed {
    first: State,
    alive: Option<File>,
    parked: Arc<Parked>,
}

impl Found {
    /// What the export wants to know.
    fn parked(self) -> (StateFile, Resumed, Vec<(u64, OwnedFd)>) {
        let parked = Arc::new(Parked { terms: self.first.terms(), devices: self.devices });
        (self.state, Resumed { first: self.first, alive: self.alive, parked }, self.late)
    }
}

impl Kept {
    fn new(
        notify: Notify,
        helper: Option<OwnedFd>,
        mut found: Option<Found>,
    ) -> Result<Kept, Failure> {
        let right = found.as_mut().and_then(|found| found.right.take());
        let cannot =
            |error| Failure::system("no memory for the state of the mount", &error, Exit::Limit);
        let (state, found, late) = match found.map(Found::parked) {
            Some((state, found, late)) => (state, Some(Box::new(found)), late),
            None => (StateFile::make().map_err(cannot)?, None, Vec::new()),
        };
        Ok(Kept { notify: Arc::new(notify), helper, state, found, late, right, names: Vec::new() })
    }

    /// The mount to go on with, if there is one.
    pub fn resumed(&self) -> Option<(State, Arc<Parked>)> {
        let found = self.found.as_ref()?;
        Some((self.state.state()?, Arc::clone(&found.parked)))
    }

    /// What the mount to go on with was made with, as the first server said before it was confined.
    pub fn first(&self) -> Option<&State> {
        self.found.as_ref().map(|found| &found.first)
    }

    /// What keeps its jobs, and those of the process before.
    pub fn jobs(&mut self) -> (KeptJobs, Vec<HandedJob>) {
        let keeper = KeptJobs::new(&self.notify, 0, self.state.clone());
        let found = keeper.found(std::mem::take(&mut self.late));
        (keeper, found)
    }

    /// Signals are taken from now on.
    pub fn listens(&self) {
        self.notify.status("opening the image");
    }

    /// Whether a process of ours keeps the mount: it also has the pid file.
    pub fn has_supervisor(&self) -> bool {
        self.helper.is_some()
    }

    /// The lock that says that the mount is served, if the process before us took it.
    pub fn take_alive(&mut self) -> Option<File> {
        self.found.as_mut()?.alive.take()
    }

    /// How the mount of the process before us has ended; `None`: it has not, or there is none.
    pub fn ended(&self) -> Option<Ended> {
        let found = self.found.as_ref()?;
        let record = self.state.record().ok()?;
        ended(&found.parked, &record)
    }

    /// For the export.
    ///
    /// Errors: no descriptor, no memory.
    pub fn keep(&self) -> Result<Keep, Failure> {
        let cannot = |error| Failure::system("the state of the mount", &error, Exit::Limit);
        let record = Arc::new(self.state.record().map_err(cannot)?);
        Ok(Keep { record, resume: self.found.as_ref().map(|found| Arc::clone(&found.parked)) })
    }

    /// Where the state is written.
    pub fn state_file(&self) -> StateFile {
        self.state.clone()
    }

    /// Gives everything to the process that keeps it. When this returns, this process may be
    /// killed.
    ///
    /// * `is_upgrade`: another process serves the mount until [`Kept::took_over`].
    ///
    /// Errors: it was not taken.
    pub fn park(
        &mut self,
        parked: &Parked,
        state: State,
        alive: Option<&File>,
        is_upgrade: bool,
    ) -> Result<(), Failure> {
        let cannot = |error| {
            Failure::system("nobody keeps the descriptors of the mount", &error, Exit::General)
                .hint("leave --keep-mount out")
        };
        let origin = state.seal().map_err(cannot)?;
        self.state.write(state)?;
        let mut all = vec![
            (ORIGIN.to_owned(), origin.as_fd()),
            (STATE.to_owned(), self.state.descriptor().as_fd()),
        ];
        all.extend(alive.map(|file| (ALIVE.to_owned(), file.as_fd())));
        let devices = parked.devices.iter().enumerate();
        all.extend(devices.map(|(number, device)| (format!("{DEVICE}{number}"), device.as_fd())));
        for (name, descriptor) in all {
            self.notify.store(&name, descriptor).map_err(cannot)?;
            self.names.push(name);
        }
        if self.has_supervisor() {
            let right = Succession::of_start(is_upgrade).map_err(cannot)?;
            self.notify.store(&succession::name_of(0), right.as_fd()).map_err(cannot)?;
            self.right = Some(right);
        }
        self.notify.barrier().map_err(cannot)
    }

    /// To go on with the mount: for a process that takes it over. `None`: a service manager keeps
    /// it.
    ///
    /// Errors: no descriptor is left.
    pub fn right(&self) -> io::Result<Option<Succession>> {
        self.right.as_ref().map(Succession::try_clone).transpose()
    }

    /// What another process served is ours: when this one is killed, the next one goes on with it,
    /// although nothing was ready yet.
    pub fn took_over(&self) {
        self.right.iter().for_each(Succession::is_ours);
        self.notify.say(Word::TookOver, "");
    }

    /// Calls `say` when the process that keeps the mount is gone: nobody starts another one from
    /// then on.
    pub fn watch(&self, say: impl FnOnce() + Send + 'static) {
        if let Some(helper) = &self.helper {
            link::watch(helper, say);
        }
    }

    /// The mount has ended: nothing of it is kept any longer.
    pub fn forget(&self, alive: Option<&File>) {
        if let Some(alive) = alive {
            mount_lock::release(alive);
        }
        if self.has_supervisor() {
            return;
        }
        let devices = self.found.as_ref().map_or(0, |found| found.parked.devices.len());
        let found = (0..devices).map(|number| format!("{DEVICE}{number}"));
        let others = [ORIGIN, STATE, ALIVE].map(str::to_owned);
        let found = found.chain(others.into_iter().filter(|_| devices > 0));
        for name in self.names.iter().cloned().chain(found) {
            self.notify.unstore(&name);
        }
    }
}
