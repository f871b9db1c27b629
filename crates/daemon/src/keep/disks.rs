//! Disks of virtual machines that outlive the process that serves them (`serve --keep`).
//!
//! Promises: at every moment at which the server may be killed, the helper process
//! ([`super::supervisor`]) has the connection of each front end and all that it has lent; the
//! successor goes on with them. The state that was sealed at the start says which images a disk
//! has; the successor judges what the server said later as it judges what a front end says. Control
//! path.
//!
//! Of disk `N` are kept: what was sealed (`ringdisk-origin-N`), its images
//! (`ringdisk-images-N`), the state of its export (`ringdisk-export-N`; empty: it has ended), and
//! whatever descriptors that one names (`ringdisk-late-N-M`), those of its jobs, and the right to
//! go on with it ([`super::succession`]).

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringdisk_export::keep::{Keeper, KeptState};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Resource, getrlimit};

use super::held::{Held, LATE};
use super::jobs::{KeptJobs, is_of_job, kept_or_alone};
use super::link::{self, Named};
use super::slots::FRONT_END;
use super::state::{State, StateFile};
use super::succession::{self, Succession};
use crate::failure::{Exit, Failure};
use crate::helper::start::Role as Started;
use crate::notify::{Notify, Word};

const ORIGIN: &str = "ringdisk-origin-";
const IMAGES: &str = "ringdisk-images-";
const EXPORT: &str = "ringdisk-export-";

/// Descriptors of a disk that come and go, at most: 700 of one with 509 regions of memory and 64
/// virtqueues, which a successor gives anew before it takes the old ones back, and those that the
/// helper process has not closed yet.
const LATE_MAX: usize = 2048;

/// Descriptors that the helper process has besides, with those of one message: its own, and those
/// for tasks (images, names that it removes at the end).
const OTHERS: usize = 128 + ringdisk_messages::DESCRIPTORS_MAX;

/// Descriptors of one of several disks that come and go, at most. Both processes have the same
/// limit of descriptors, so each knows it.
fn late_max(disks: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    let share = limit.map(|limit| limit.saturating_sub(OTHERS) / disks.max(1));
    share.map_or(LATE_MAX, |share| share.min(LATE_MAX))
}

/// How many of them a server may send: a quarter is for those that are not closed yet.
fn parked_max(disks: usize) -> usize {
    late_max(disks) / 4 * 3
}

/// What this process is.
#[derive(Debug)]
pub enum Role {
    /// It serves, and the helper process keeps the disks.
    Serves(KeptDisks),
    /// It is the helper process, and has started a server.
    Holds,
}

/// Decides whether this process serves the disks of `serve --keep`, or is their helper process.
///
/// * `count`: disks.
///
/// Errors: what was kept cannot be used.
pub fn role(count: usize) -> Result<Role, Failure> {
    if Started::Kept.is_orphaned() {
        return Err(Failure::new(
            Exit::General,
            "the process that keeps the disks was gone before this one could serve them",
        ));
    }
    if !Started::Kept.is_ours() {
        return Ok(Role::Holds);
    }
    let (notify, helper, parked) = link::enter("disks")?;
    let notify = Arc::new(notify);
    let found = found(parked, count, &notify)?;
    Ok(Role::Serves(KeptDisks { notify, helper, count, found }))
}

/// The kept disks, in the server.
#[derive(Debug)]
pub struct KeptDisks {
    /// Reports to the helper process how the server is.
    pub notify: Arc<Notify>,
    helper: OwnedFd,
    /// Number of disks.
    count: usize,
    /// Disks of a server that was killed, in their order.
    found: Option<Vec<FoundDisk>>,
}

/// One disk of a process that was killed.
#[derive(Debug)]
pub struct FoundDisk {
    /// The state that was sealed at its start.
    pub first: State,
    /// The newest state of its images.
    pub images: StateFile,
    /// The newest state of its export; `None`: the export has ended.
    pub export: Option<KeptState>,
    /// Keeps the state of the export from now on.
    pub keeper: Box<dyn Keeper>,
    /// Descriptors of its jobs, by their numbers.
    pub late: Vec<(u64, OwnedFd)>,
    /// The right to go on with it, for a successor. `None`: the process before gave none, so none
    /// can take it over.
    pub succession: Option<Succession>,
}

/// Keeps the state of one export.
#[derive(Debug)]
struct DiskKeeper {
    notify: Arc<Notify>,
    disk: usize,
    memory: File,
    /// The number of the newest state.
    number: u64,
    /// Numbers of the descriptors that the helper process has.
    parked: HashSet<u64>,
    /// Most descriptors that the helper process takes for this disk.
    parked_max: usize,
    is_ended: bool,
    /// The right to go on with the disk, where it is an export of its own.
    right: Option<Succession>,
}

impl DiskKeeper {
    /// Asks the helper process to close these descriptors.
    fn release_all(&mut self) {
        for number in std::mem::take(&mut self.parked) {
            self.notify.unstore(&self.name(number));
        }
    }

    fn name(&self, number: u64) -> String {
        format!("{LATE}{}-{number}", self.disk)
    }
}

impl Keeper for DiskKeeper {
    fn park(&mut self, number: u64, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // The helper process would drop it without an answer.
        if self.parked.len() >= self.parked_max {
            let text = format!("more than {} descriptors", self.parked_max);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, text));
        }
        // A message in the socket reaches the helper process, even if this process is killed now.
        kept_or_alone(self.notify.store(&self.name(number), descriptor))?;
        self.parked.insert(number);
        Ok(())
    }

    fn release(&mut self, number: u64) {
        self.parked.remove(&number);
        self.notify.unstore(&self.name(number));
    }

    fn write(&mut self, state: &str) -> io::Result<()> {
        FRONT_END.put(&self.memory, self.number + 1, state.as_bytes())?;
        self.number += 1;
        Ok(())
    }

    fn leave(&mut self) {
        self.is_ended = true;
        // Memory and sockets of the front end are the successor's alone from then on.
        if self.right.as_ref().is_some_and(Succession::is_claimed_soon) {
            self.release_all();
        }
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.is_ended, true) {
            return;
        }
        if let Err(error) = self.write("") {
            tracing::warn!("the end of disk {} is not kept: {error}", self.disk);
        }
        self.release_all();
    }
}

/// When an export ends without a kill, in whatever way, no next server goes on with it.
impl Drop for DiskKeeper {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        }
    }
}

impl KeptDisks {
    /// Disks of a killed server to go on with, if there are any.
    pub fn take_found(&mut self) -> Option<Vec<FoundDisk>> {
        self.found.take()
    }

    /// Tells the helper process that this server handles signals from now on.
    pub fn listens(&self) {
        self.notify.status("opening the images");
    }

    /// Keeps a new disk from now on.
    ///
    /// * `right`: to go on with it, if it is an export of its own.
    ///
    /// Errors: memory is short; the helper process is gone.
    pub fn keep(
        &self,
        disk: usize,
        right: Option<&Succession>,
    ) -> Result<Box<dyn Keeper>, Failure> {
        let right = right.map(Succession::try_clone).transpose();
        let right = right.map_err(|error| cannot(&error))?;
        let memory = memfd_create(c"ringdisk-export", MemfdFlags::CLOEXEC);
        let memory = memory.map(File::from).map_err(|errno| cannot(&errno.into()))?;
        self.notify
            .store(&format!("{EXPORT}{disk}"), memory.as_fd())
            .map_err(|error| cannot(&error))?;
        Ok(Box::new(DiskKeeper {
            notify: Arc::clone(&self.notify),
            disk,
            memory,
            number: 0,
            parked: HashSet::new(),
            parked_max: parked_max(self.count),
            is_ended: false,
            right,
        }))
    }

    /// The right to go on with a disk, which a successor gets when it takes the disk over.
    ///
    /// * `is_upgrade`: another process serves the disk until [`Succession::is_ours`].
    ///
    /// Errors: no descriptor is left; the helper process is gone.
    pub fn keep_succession(&self, disk: usize, is_upgrade: bool) -> Result<Succession, Failure> {
        let succession = Succession::of_start(is_upgrade).map_err(|error| cannot(&error))?;
        self.notify
            .store(&succession::name_of(disk), succession.as_fd())
            .map_err(|error| cannot(&error))?;
        Ok(succession)
    }

    /// Keeps the state of the images of a new disk.
    ///
    /// Errors: memory is short; the helper process is gone.
    pub fn keep_images(&self, disk: usize, state: State) -> Result<StateFile, Failure> {
        let origin = state.seal().map_err(|error| cannot(&error))?;
        let images = StateFile::make().map_err(|error| cannot(&error))?;
        images.write(state)?;
        for (name, descriptor) in [(ORIGIN, origin.as_fd()), (IMAGES, images.descriptor().as_fd())]
        {
            self.notify
                .store(&format!("{name}{disk}"), descriptor)
                .map_err(|error| cannot(&error))?;
        }
        Ok(images)
    }

    /// Tells the helper process that this server owns what the predecessor served: when this server
    /// is killed now, the next one goes on with it, although nothing was ready yet.
    pub fn took_over(&self) {
        self.notify.say(Word::TookOver, "");
    }

    /// Keeps the jobs of a disk.
    ///
    /// * `images`: its state.
    pub fn keep_jobs(&self, disk: usize, images: &StateFile) -> KeptJobs {
        KeptJobs::new(&self.notify, disk, images.clone())
    }

    /// Waits until the helper process has all descriptors of the start. When this returns, the
    /// server may be killed.
    ///
    /// Errors: the helper process does not answer.
    pub fn is_kept(&self) -> Result<(), Failure> {
        self.notify.barrier().map_err(|error| cannot(&error))
    }

    /// Calls `say` when the helper process has ended: no next server is started from then on.
    pub fn watch(&self, say: impl FnOnce() + Send + 'static) {
        link::watch(&self.helper, say);
    }
}

fn cannot(error: &io::Error) -> Failure {
    Failure::system("the disk cannot be kept", error, Exit::General).hint("leave --keep out")
}

/// Sorts parked descriptors out; `None`: there are none.
///
/// Errors: a state is of another version, or cannot be read; something is missing, or there twice.
fn found(
    parked: Named,
    count: usize,
    notify: &Arc<Notify>,
) -> Result<Option<Vec<FoundDisk>>, Failure> {
    let mut parts: Vec<Parts> = (0..count).map(|_| Parts::default()).collect();
    let mut is_empty = true;
    for (name, descriptor) in parked {
        is_empty &= name.is_empty();
        let Some((disk, part)) = Part::of(&name) else { continue };
        let Some(parts) = parts.get_mut(disk) else { continue };
        let place = match part {
            Part::Origin => &mut parts.origin,
            Part::Images => &mut parts.images,
            Part::Export => &mut parts.export,
            Part::Late(number) => {
                parts.late.push((number, descriptor));
                continue;
            }
        };
        // With two of them it is unknown which one was sealed at the start.
        if place.replace(descriptor).is_some() {
            let what = format!("of disk {disk} two descriptors '{name}' were kept");
            return Err(Failure::new(Exit::General, what));
        }
    }
    if is_empty {
        return Ok(None);
    }
    let disks = parts
        .into_iter()
        .enumerate()
        .map(|(disk, parts)| parts.open(disk, notify, parked_max(count)));
    disks.collect::<Result<Vec<_>, _>>().map(Some)
}

/// What a descriptor of a disk is.
enum Part {
    Origin,
    Images,
    Export,
    /// A descriptor with a number, which the state of the export names.
    Late(u64),
}

impl Part {
    /// The number of the disk in a name, and which part of the disk it names.
    fn of(name: &str) -> Option<(usize, Part)> {
        for (prefix, part) in
            [(ORIGIN, Part::Origin), (IMAGES, Part::Images), (EXPORT, Part::Export)]
        {
            if let Some(disk) = name.strip_prefix(prefix) {
                return Some((disk.parse().ok()?, part));
            }
        }
        let (disk, number) = name.strip_prefix(LATE)?.split_once('-')?;
        Some((disk.parse().ok()?, Part::Late(number.parse().ok()?)))
    }
}

/// All that is kept of one disk.
#[derive(Default)]
struct Parts {
    origin: Option<OwnedFd>,
    images: Option<OwnedFd>,
    export: Option<OwnedFd>,
    late: Vec<(u64, OwnedFd)>,
}

impl Parts {
    fn open(
        self,
        disk: usize,
        notify: &Arc<Notify>,
        parked_max: usize,
    ) -> Result<FoundDisk, Failure> {
        let missing = || {
            Failure::new(Exit::General, format!("what was kept of disk {disk} is not all there"))
        };
        let first = State::sealed(&self.origin.ok_or_else(missing)?)?;
        let images = StateFile::open(self.images.ok_or_else(missing)?, first.clone())?;
        let memory = File::from(self.export.ok_or_else(missing)?);
        let (number, words) = FRONT_END.newest(&memory).ok_or_else(missing)?;
        let words = String::from_utf8(words).map_err(|_| missing())?;
        let (rights, late): (Vec<_>, Vec<_>) =
            self.late.into_iter().partition(|(number, _)| *number == succession::NUMBER);
        let mut rights = rights.into_iter().filter_map(|(_, right)| Succession::of(right).ok());
        let succession = rights.next();
        let was_given = succession.as_ref().is_some_and(Succession::is_claimed);
        let (of_jobs, late): (Vec<_>, Vec<_>) =
            late.into_iter().partition(|(number, _)| is_of_job(*number));
        let keeper = DiskKeeper {
            notify: Arc::clone(notify),
            disk,
            memory,
            number,
            parked: late.iter().map(|(number, _)| *number).collect(),
            parked_max,
            is_ended: words.is_empty() || was_given,
            right: succession.as_ref().and_then(|right| right.try_clone().ok()),
        };
        let export = KeptState { words, descriptors: late };
        // A successor has the disk, or the disk has ended.
        let export = Some(export).filter(|export| !export.words.is_empty() && !was_given);
        let keeper = Box::new(keeper);
        Ok(FoundDisk { first, images, export, keeper, late: of_jobs, succession })
    }
}

/// Kept disks, as the helper process knows them: their number.
#[derive(Debug)]
pub struct HeldDisks(pub usize);

impl Held for HeldDisks {
    fn noun(&self) -> &'static str {
        "disk"
    }

    fn option(&self) -> &'static str {
        "--keep"
    }

    fn disks(&self) -> usize {
        self.0
    }

    fn late_max(&self) -> usize {
        late_max(self.0)
    }

    fn loss(&self) -> &'static str {
        "its front end is disconnected"
    }

    fn remedy(&self) -> &'static str {
        "look at what it said before it died, then serve the image again"
    }

    /// With the last copy of its socket a front end sees the end of the connection. The end of this
    /// process closes it, and does not wait for what other processes do, as a close here might.
    fn end(&mut self, parked: Named, _is_removed: bool) {
        std::mem::forget(parked);
    }

    fn undo(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        tempfile::tempfile().expect("a file").into()
    }

    #[test]
    fn a_second_descriptor_of_the_start_is_refused() {
        let notify = Arc::new(Notify::from_environment());
        for name in ["ringdisk-origin-0", "ringdisk-images-0", "ringdisk-export-0"] {
            let parked = vec![(name.to_owned(), file()), (name.to_owned(), file())];
            let failure = found(parked, 1, &notify).expect_err("refused");
            assert!(failure.message().contains("two descriptors"), "{}", failure.message());
        }
    }
    #[test]
    fn too_many_descriptors_are_an_error_until_some_are_let_go_of() {
        let memory = tempfile::tempfile().expect("a file");
        let kind = rustix::net::SocketType::SEQPACKET;
        let (ours, _holder) = ringdisk_messages::pair(kind).expect("sockets");
        let mut keeper = DiskKeeper {
            notify: Arc::new(Notify::over(ours)),
            disk: 0,
            memory,
            number: 0,
            parked: HashSet::new(),
            parked_max: 2,
            is_ended: false,
            right: None,
        };
        let file = file();
        assert!((1..3).all(|number| keeper.park(number, file.as_fd()).is_ok()));
        let error = keeper.park(3, file.as_fd()).expect_err("too many");
        assert!(error.to_string().contains("more than 2"), "{error}");
        keeper.release(1);
        keeper.park(3, file.as_fd()).expect("room");
    }
}
