//! The table of changes as NBD clients meet it: every change of a disk in use × every request of
//! the protocol that is in flight then × every storage operation that fails or is held for a while.
//! (What becomes of images and bitmaps: the table of the crate `disk`.)
//!
//! Whatever fails: each request gets one reply with its cookie, with an error only where an
//! operation of the disk's own storage failed; the connection goes on; what was answered is there,
//! also through the connection that was open before the change; a change that was refused can be
//! made again.
//!
//! A raw disk is on simulated storage, all of whose operations fail; of a qcow2, which is a file,
//! those of the fleecing file and of the target do. A seeded part runs each time, all of it with
//! `RINGDISK_FULL=1`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{
    Bytes, CheckpointEnd, CheckpointOptions, CheckpointState, Disk, Error, Format, ImageOptions,
    MirrorControl, MirrorOptions, MirrorSync, OnError, OverlayOptions, Progress, ResizeOptions,
    SnapshotChange,
};
use ringdisk_nbd::{DirtyBitmap, NamedDisk};
use ringdisk_nbd_protocol::numbers::{command, command_flags as flags, errno};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::StatusPayload;
use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::process::{patient, until};
use ringdisk_testkit::sim::{Fault, Prng, SimStorage, When};
use tempfile::TempDir;

use crate::client::{Client, LIMIT, Reply, Server, data, flagged, open, options, request};

const SIZE: u64 = 1 << 20;
const LARGE: u64 = 2 << 20;
/// The byte of the first half of the disk; the second one reads as zeroes.
const OLD: u8 = 7;
/// Where the request of a cell is, and one that comes in the middle of the change.
const FIRST: (u64, u64) = (64 << 10, 40 << 10);
const LATER: (u64, u64) = (300 << 10, 12 << 10);
/// What the bitmap of the export marks.
const DIRTY: (u64, u64) = (128 << 10, 192 << 10);
const STYLE: Style = Style::Structured;
/// Cells of the seeded part, for each change and storage.
const CELLS: u64 = 9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Raw,
    Qcow2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Grow,
    Checkpoint,
    /// Ends with a switch-over.
    Mirror,
    MirrorLeft,
    External,
    Internal,
}

/// Which storage has the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Own,
    /// The fleecing file, or the target.
    Beside,
}

/// The requests, by command and flags; the last one is asked for the bitmap, too.
const REQUESTS: [(u16, u16); 10] = [
    (command::READ, 0),
    (command::READ, flags::DF),
    (command::WRITE, 0),
    (command::WRITE, flags::FUA),
    (command::FLUSH, 0),
    (command::TRIM, 0),
    (command::WRITE_ZEROES, flags::NO_HOLE),
    (command::CACHE, 0),
    (command::BLOCK_STATUS, 0),
    (command::BLOCK_STATUS, 0),
];
const WITH_BITMAP: usize = REQUESTS.len() - 1;

#[derive(Clone, Copy, Debug)]
enum Injected {
    Io,
    NoSpace,
    Hold,
}

impl Injected {
    const ALL: [Injected; 3] = [Injected::Io, Injected::NoSpace, Injected::Hold];

    fn fault(self) -> Fault {
        match self {
            Injected::Io => Fault::Fail(Errno::IO),
            Injected::NoSpace => Fault::Fail(Errno::NOSPC),
            Injected::Hold => Fault::Hold,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    shape: Shape,
    change: Change,
    victim: Victim,
    request: usize,
    injected: Injected,
    /// Of the operations of the victim since the change began.
    number: u64,
}

/// The disk of a cell, and its storages.
struct World {
    disk: Arc<Disk>,
    own: Option<SimStorage>,
    beside: SimStorage,
    overlay: PathBuf,
    _directory: TempDir,
}

impl World {
    fn new(cell: Cell, image: &Path) -> World {
        let directory = tempfile::tempdir().unwrap();
        let (disk, own) = match cell.shape {
            Shape::Raw => {
                let mut bytes = vec![OLD; SIZE as usize];
                bytes[SIZE as usize / 2..].fill(0);
                let sim = SimStorage::from_image(&bytes, 1);
                (Disk::from_storage(sim.storage(), &ImageOptions::default()), Some(sim))
            }
            Shape::Qcow2 => {
                let path = directory.path().join("disk.qcow2");
                std::fs::copy(image, &path).unwrap();
                (open(&path, Format::Qcow2), None)
            }
        };
        let beside = match cell.change {
            Change::Mirror | Change::MirrorLeft => SimStorage::new(SIZE, 2),
            _ => SimStorage::new(0, 2),
        };
        let overlay = directory.path().join("overlay.qcow2");
        World { disk, own, beside, overlay, _directory: directory }
    }

    fn victim(&self, victim: Victim) -> &SimStorage {
        match victim {
            Victim::Own => self.own.as_ref().expect("simulated"),
            Victim::Beside => &self.beside,
        }
    }

    fn release(&self) {
        self.own.iter().chain([&self.beside]).for_each(|sim| {
            sim.release_all();
        });
    }
}

/// What the thread of a change has of the world.
#[derive(Clone)]
struct Means {
    disk: Arc<Disk>,
    beside: SimStorage,
    overlay: PathBuf,
    /// A checkpoint keeps the state.
    is_frozen: Arc<AtomicBool>,
}

impl Means {
    /// Makes the change, on a thread and a ring of its own.
    fn make(&self, cell: Cell) -> Result<(), Error> {
        let mut runtime = Runtime::new(Config::default()).unwrap();
        let ring = runtime.ring().clone();
        runtime.block_on(self.change(&ring, cell))
    }

    async fn change(&self, ring: &Ring, cell: Cell) -> Result<(), Error> {
        let disk = &self.disk;
        match cell.change {
            Change::Grow => {
                disk.resize_with(ring, Bytes(LARGE), ResizeOptions::default()).await.map(drop)
            }
            Change::Checkpoint => self.checkpoint(ring, cell).await,
            Change::Mirror | Change::MirrorLeft => {
                let progress = Arc::new(Progress::new());
                progress.set_on_error(OnError::Report);
                let control = Arc::new(MirrorControl::new());
                control.complete(cell.change == Change::Mirror).expect("nothing refuses it yet");
                let target = Disk::from_storage(self.beside.storage(), &ImageOptions::default());
                let options =
                    MirrorOptions { sync: MirrorSync::Full, write_blocking: false, left: None };
                disk.mirror(ring, target, options, &progress, &control).await.map(drop)
            }
            Change::External => {
                disk.add_overlay(ring, &self.overlay, OverlayOptions::default()).await
            }
            Change::Internal => {
                disk.snapshot(ring, SnapshotChange::Create(String::from("s"))).await
            }
        }
    }

    /// Begins a checkpoint, reads what it keeps, and ends it.
    async fn checkpoint(&self, ring: &Ring, cell: Cell) -> Result<(), Error> {
        let options = CheckpointOptions {
            copy_limit: Duration::from_secs(600),
            ..CheckpointOptions::new(self.beside.storage(), Bytes(1 << 30))
        };
        let prepared = self.disk.prepare_checkpoint(ring, options).await?;
        let frozen = match self.disk.hold(ring, LIMIT).await {
            Ok(mut held) => held.freeze(&prepared),
            Err(error) => Err(error),
        };
        let checkpoint = match frozen {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                prepared.abandon(ring).await?;
                return Err(error);
            }
        };
        // A client writes now, and what it overwrites is kept first.
        self.is_frozen.store(true, Ordering::Release);
        for _ in 0..50 {
            if !self.beside.log().is_empty() {
                break;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
        let buf = IoBuf::new(SIZE as usize, 4096);
        let read = checkpoint.disk().read(ring, 0, &buf).await;
        if read == Ok(SIZE as usize) && checkpoint.state() == CheckpointState::Running {
            let mut bytes = vec![0; SIZE as usize];
            buf.copy_to_slice(0, &mut bytes);
            let differs = (0..SIZE).find(|&at| {
                let old = if at < SIZE / 2 { OLD } else { 0 };
                bytes[at as usize] != old && !is_in(at, FIRST) && !is_in(at, LATER)
            });
            assert_eq!(differs, None, "the frozen state, {cell:?}");
        }
        checkpoint.end(ring, CheckpointEnd::Drop).await
    }
}

fn is_in(at: u64, (start, len): (u64, u64)) -> bool {
    (start..start + len).contains(&at)
}

/// One that has entered, with the contexts of a cell.
fn client(server: &Server, number: usize) -> Client {
    let all = ["base:allocation", "qemu:dirty-bitmap:b"];
    let contexts = if number == WITH_BITMAP { &all[..] } else { &all[..1] };
    let mut client = server.connect();
    client.greet();
    client.agree(STYLE);
    assert_eq!(client.set_contexts(contexts).len(), contexts.len());
    client.go("");
    client
}

/// The request of a cell, and what it sends.
fn asked(number: usize) -> (Request, Vec<u8>) {
    let (command, flags) = REQUESTS[number];
    let (offset, len) = if command == command::FLUSH { (0, 0) } else { FIRST };
    let bytes = if command == command::WRITE { vec![0x11; len as usize] } else { Vec::new() };
    (Request { cookie: 1, ..flagged(command, flags, offset, len) }, bytes)
}

/// The byte that a request leaves in its range.
fn left_by(number: usize) -> Option<u8> {
    match REQUESTS[number].0 {
        command::WRITE => Some(0x11),
        // What was trimmed reads as zeroes on these disks.
        command::TRIM | command::WRITE_ZEROES => Some(0),
        _ => None,
    }
}

/// A reply that succeeded says what the request asks.
fn judge_reply(reply: &Reply, cell: Cell) {
    match REQUESTS[cell.request].0 {
        command::READ => {
            let bytes = data(reply, FIRST.0, FIRST.1 as usize);
            assert!(bytes == vec![OLD; FIRST.1 as usize], "{cell:?}");
        }
        command::BLOCK_STATUS => {
            let contexts = reply.chunks.len();
            assert_eq!(contexts, 1 + usize::from(cell.request == WITH_BITMAP), "{cell:?}");
            for (kind, payload) in &reply.chunks {
                let status = StatusPayload::parse(*kind, payload).unwrap();
                let extents: Vec<_> =
                    status.extents().map(|extent| (extent.len, extent.flags)).collect();
                if status.id == 1 {
                    // From 64 KiB on 64 KiB are clean: longer than the request.
                    assert_eq!(extents[0].1, 0, "{cell:?}");
                }
                assert!(extents[0].0 > 0, "{extents:?} {cell:?}");
            }
        }
        _ => assert!(reply.chunks.iter().all(|(_, data)| data.is_empty()), "{cell:?}"),
    }
}

/// Runs one cell. Gives the operations of the victim during the change, and whether the one of the
/// cell was among them.
fn judge(cell: Cell, image: &Path) -> (u64, bool) {
    let world = World::new(cell, image);
    let bitmap = DirtyBitmap {
        name: String::from("b"),
        ranges: Arc::from([(DIRTY.0, DIRTY.0 + DIRTY.1)].as_slice()),
    };
    let named = NamedDisk { bitmaps: vec![bitmap], ..NamedDisk::new("", Arc::clone(&world.disk)) };
    let mut server = Server::start(vec![named], options(1));
    let mut client = client(&server, cell.request);
    // The request is in the storage when the change begins, if it needs that.
    if let Some(own) = &world.own {
        own.on(When::any().once(), Fault::Hold);
    }
    let (first, payload) = asked(cell.request);
    client.start(STYLE, first, &payload);
    let held = || world.own.as_ref().is_some_and(|own| !own.held().is_empty()).then_some(());
    until(Duration::from_millis(2), held);
    world.own.iter().for_each(SimStorage::clear_rules);
    let victim = world.victim(cell.victim);
    let begin = victim.log().len() as u64;
    if cell.number != u64::MAX {
        victim.on(When::number(begin + cell.number), cell.injected.fault());
    }
    let (disk, beside) = (Arc::clone(&world.disk), world.beside.clone());
    let is_frozen = Arc::new(AtomicBool::new(false));
    let means = Means { disk, beside, overlay: world.overlay.clone(), is_frozen };
    let its = means.clone();
    let changing = std::thread::spawn(move || its.make(cell));
    if cell.change == Change::Checkpoint {
        let begun = until(patient(LIMIT), || {
            world.release();
            let is_frozen = means.is_frozen.load(Ordering::Acquire);
            (is_frozen || changing.is_finished()).then_some(())
        });
        assert!(begun.is_some(), "hangs: {cell:?}");
    }
    let later = Request { cookie: 2, ..request(command::WRITE, LATER.0, LATER.1) };
    client.start(STYLE, later, &vec![0x22; LATER.1 as usize]);
    let is_over = until(patient(LIMIT), || {
        world.release();
        changing.is_finished().then_some(())
    });
    assert!(is_over.is_some(), "hangs: {cell:?}");
    let made = changing.join().unwrap();
    victim.clear_rules();
    world.release();
    let operations = victim.log().len() as u64 - begin;
    let reached = operations > cell.number;
    let fails = reached && !matches!(cell.injected, Injected::Hold);
    // No failure of what is beside the disk is one of a client, until that is the disk.
    let has_moved = cell.change == Change::Mirror && made.is_ok();
    let may_fail = fails && (cell.victim == Victim::Own || has_moved);
    let mut answered = [None, None];
    for _ in 0..2 {
        let reply = client.reply_of(STYLE, |_| 0);
        let place = usize::try_from(reply.cookie - 1).expect("a cookie of ours");
        assert!(answered[place].is_none(), "two replies: {cell:?}");
        let is_known = [0, errno::EIO, errno::ENOSPC].contains(&reply.error);
        assert!(is_known && (reply.error == 0 || may_fail), "{reply:?} {cell:?}");
        if place == 0 && reply.error == 0 {
            judge_reply(&reply, cell);
        }
        answered[place] = Some(reply.error == 0);
    }
    let [first_done, later_done] = answered.map(Option::unwrap);
    if let Err(error) = made {
        assert!(fails, "{error:?} without a failure: {cell:?}");
        let is_busy = matches!(cell.change, Change::Mirror | Change::MirrorLeft);
        if world.disk.fault().is_none() {
            let again = match is_busy || cell.change == Change::Checkpoint {
                // What has failed may still get what was sent to it.
                true => {
                    let beside = World::new(cell, image).beside;
                    Means { beside, ..means.clone() }
                }
                false => means.clone(),
            };
            let made = std::thread::spawn(move || again.make(cell)).join().unwrap();
            assert!(made.is_ok(), "{made:?} again: {cell:?}");
        }
    }
    // The connection goes on, with the size that it knows.
    let reply = client.call(STYLE, request(command::READ, 0, SIZE), &[]);
    assert_eq!(reply.error, 0, "{reply:?} {cell:?}");
    let bytes = data(&reply, 0, SIZE as usize);
    let expected = |at: u64| {
        let old = if at < SIZE / 2 { OLD } else { 0 };
        match (left_by(cell.request).filter(|_| is_in(at, FIRST)), is_in(at, LATER)) {
            (Some(new), _) => (new, if first_done { new } else { old }),
            (_, true) => (0x22, if later_done { 0x22 } else { old }),
            _ => (old, old),
        }
    };
    let is_wrong = |at: &u64| {
        let (new, or) = expected(*at);
        let byte = bytes[*at as usize];
        byte != new && byte != or
    };
    assert_eq!((0..SIZE).find(is_wrong), None, "byte at, {cell:?}");
    // A new one has the size of now.
    let mut newer = server.connect();
    newer.greet();
    newer.agree(STYLE);
    assert_eq!(newer.go("").size, world.disk.size().0, "{cell:?}");
    let write = request(command::WRITE, LATER.0, 512);
    assert_eq!(newer.call(STYLE, write, &[0x33; 512]).error, 0, "{cell:?}");
    let reply = client.call(STYLE, request(command::READ, LATER.0, 512), &[]);
    assert!(data(&reply, LATER.0, 512) == [0x33; 512], "{cell:?}");
    drop((client, newer));
    let ended = server.stop();
    // A flush that failed is told again at the end.
    assert!(ended.is_ok() || fails, "{ended:?} {cell:?}");
    (operations, reached)
}

/// Runs the cells of one change.
fn table(change: Change, shapes: &[(Shape, Victim)]) {
    let is_full = std::env::var_os("RINGDISK_FULL").is_some();
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    images::qcow2(&image, &SIZE.to_string(), "cluster_size=16k");
    images::qemu_io(&image, "qcow2", &[&format!("write -P {OLD} 0 {}", SIZE / 2)]);
    for &(shape, victim) in shapes {
        let mut prng = Prng::new(18 + change as u64);
        let quiet =
            Cell { shape, change, victim, request: 2, injected: Injected::Hold, number: u64::MAX };
        let (operations, _) = judge(quiet, &image);
        assert!(operations > 0, "{quiet:?}");
        let (requests, injected) = (REQUESTS.len() as u64, Injected::ALL.len() as u64);
        let all = operations * requests * injected;
        let mut reached = 0;
        for index in 0..if is_full { all } else { CELLS } {
            let index = if is_full { index } else { prng.below(all) };
            let cell = Cell {
                request: (index % requests) as usize,
                injected: Injected::ALL[(index / requests % injected) as usize],
                number: index / requests / injected,
                ..quiet
            };
            reached += u64::from(judge(cell, &image).1);
        }
        assert!(reached > 0, "{change:?}: no operation failed");
    }
}

#[test]
fn clients_go_on_while_the_disk_grows() {
    table(Change::Grow, &[(Shape::Raw, Victim::Own)]);
}

#[test]
fn clients_go_on_while_a_checkpoint_begins_and_ends() {
    use Shape::{Qcow2, Raw};
    let both = [(Raw, Victim::Own), (Raw, Victim::Beside), (Qcow2, Victim::Beside)];
    table(Change::Checkpoint, &both);
}

#[test]
fn clients_go_on_while_the_disk_switches_over() {
    use Shape::{Qcow2, Raw};
    let both = [(Raw, Victim::Own), (Raw, Victim::Beside), (Qcow2, Victim::Beside)];
    table(Change::Mirror, &both);
}

#[test]
fn clients_go_on_while_a_copy_is_made() {
    use Shape::{Qcow2, Raw};
    table(Change::MirrorLeft, &[(Raw, Victim::Own), (Qcow2, Victim::Beside)]);
}

/// The files of these are no simulated ones: every request, without a failure.
#[test]
fn clients_go_on_while_snapshots_are_made() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    images::qcow2(&image, &SIZE.to_string(), "cluster_size=16k");
    images::qemu_io(&image, "qcow2", &[&format!("write -P {OLD} 0 {}", SIZE / 2)]);
    for change in [Change::External, Change::Internal] {
        for request in 0..REQUESTS.len() {
            let cell = Cell {
                shape: Shape::Qcow2,
                change,
                victim: Victim::Beside,
                request,
                injected: Injected::Hold,
                number: u64::MAX,
            };
            judge(cell, &image);
        }
    }
}
