//! Runs one cell and judges the images afterwards.

use std::cell::{Cell as Slot, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_qcow2::{Bytes, Qcow2, check_bytes};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_testkit::process::LIMIT;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use ringdisk_throttle::{Limits, Rate, Rates};

use super::changes::followed;
use super::clients::{Effect, Request, write};
use super::frozen;
use super::world::{
    BITMAP, CLUSTER, Cell, Change, Fixture, Injected, OVERLAY, Shape, Victim, World,
};
use crate::tests::{open, read_steps};
use crate::{Disk, Error, Format, ImageOptions};

/// What is known about a run.
pub(super) struct Run {
    /// Operations of the victim while the change was made.
    pub(super) operations: u64,
    /// The operation that was to fail was made.
    pub(super) reached: bool,
    /// The second one, too.
    pub(super) reached_again: bool,
}

/// What the disk may show: each byte is one of two.
#[derive(Clone)]
struct Model {
    a: Vec<u8>,
    b: Vec<u8>,
}

impl Model {
    fn resize(&mut self, size: usize) {
        self.a.resize(size, 0);
        self.b.resize(size, 0);
    }

    /// * `is_sure`: it is there; else it may be there, in part or not at all.
    fn apply(&mut self, effect: &Effect, is_sure: bool) {
        let end = effect.range.end.min(self.a.len());
        let range = effect.range.start.min(end)..end;
        self.b[range.clone()].fill(effect.byte);
        if is_sure {
            self.a[range].fill(effect.byte);
        }
    }

    /// Where the first byte is that may not be there.
    fn differs(&self, bytes: &[u8]) -> Option<usize> {
        let mut both = bytes.iter().zip(self.a.iter().zip(&self.b));
        both.position(|(it, (a, b))| it != a && it != b)
    }

    /// The disk shows one of the two, and the same from now on.
    fn settle(&mut self, bytes: Vec<u8>, cell: &Cell) {
        assert_eq!(bytes.len(), self.a.len(), "size, {cell:?}");
        let differs = self.differs(&bytes);
        let shown = differs.map(|at| (at / CLUSTER, bytes[at], self.a[at], self.b[at]));
        assert_eq!(shown, None, "cluster, byte, and what it may be, {cell:?}");
        self.a.clone_from(&bytes);
        self.b = bytes;
    }
}

/// The result of a task, once it has ended.
type Result_<T> = Rc<RefCell<Option<T>>>;

fn spawn<T: 'static>(
    ring: &Ring,
    left: &Rc<Slot<u32>>,
    task: impl Future<Output = T> + 'static,
) -> Result_<T> {
    let slot = Rc::new(RefCell::new(None));
    let (result, left) = (Rc::clone(&slot), Rc::clone(left));
    left.set(left.get() + 1);
    ring.spawn(async move {
        let value = task.await;
        *result.borrow_mut() = Some(value);
        left.set(left.get() - 1);
    });
    slot
}

async fn settle(ring: &Ring) {
    for _ in 0..30 {
        ring.yield_now().await;
    }
}

/// Runs until all tasks have ended; held operations continue whenever nothing else moves.
async fn finish(ring: &Ring, world: &World, left: &Slot<u32>, cell: &Cell) {
    let begun = Instant::now();
    while left.get() > 0 {
        settle(ring).await;
        if left.get() > 0 && world.release() == 0 {
            // A real file, or the drain, which looks every few milliseconds.
            ring.sleep(Duration::from_micros(200)).await;
        }
        assert!(begun.elapsed() < LIMIT, "hangs, {cell:?}");
    }
}

/// Requests of a second client, which come while the change is under way.
fn later() -> [Effect; 2] {
    [
        Effect { range: 12 * CLUSTER..12 * CLUSTER + 4096, byte: 0x21 },
        Effect { range: 26 * CLUSTER + 512..27 * CLUSTER, byte: 0x22 },
    ]
}

/// Writes before the change, which are in no table on the storage yet.
fn earlier() -> [Effect; 2] {
    [
        Effect { range: 14 * CLUSTER + 512..15 * CLUSTER, byte: 0x31 },
        Effect { range: 30 * CLUSTER..31 * CLUSTER + 512, byte: 0x32 },
    ]
}

/// Gives the disk a limit, and takes the burst that it allows.
async fn limit(ring: &Ring, disk: &Disk) {
    const FOR_EACH_SECOND: u64 = 500;
    let total = Rate { average: FOR_EACH_SECOND, ..Rate::default() };
    let limits = Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() };
    disk.change_limits(|_| Ok(limits)).expect("it takes limits");
    // What a tenth of a second allows.
    for _ in 0..FOR_EACH_SECOND / 10 {
        disk.read(ring, 0, &IoBuf::new(512, 512)).await.expect("read");
    }
}

/// Opens the disk of a cell, on which clients have written already.
async fn begin(ring: &Ring, fixture: &Fixture, cell: Cell) -> (World, Arc<Disk>, Model) {
    let _ = std::fs::remove_file(fixture.place.path().join(OVERLAY));
    let mut world = fixture.world(cell.change);
    let disk = world.open(ring, fixture).await;
    let mut model = Model { a: fixture.bytes.clone(), b: fixture.bytes.clone() };
    for effect in earlier() {
        assert_eq!(write(ring, &disk, Some(effect.clone())).await, Ok(()));
        model.apply(&effect, true);
    }
    if cell.change == Change::MirrorNone {
        // What is in flight when the mirror begins, and what may come before it.
        let mut there = model.clone();
        let effects = [cell.request.effect()].into_iter().chain(later().map(Some));
        effects.flatten().for_each(|effect| there.apply(&effect, true));
        world.fill_target(&there.a);
    }
    if cell.is_limited {
        limit(ring, &disk).await;
    }
    (world, disk, model)
}

/// What a change that was refused has left.
///
/// * `failed`, `is_pair`: the operation that did; another one did, too.
fn check_refusal(
    fixture: &Fixture,
    world: &World,
    disk: &Disk,
    cell: Cell,
    (failed, is_pair): (Option<OpKind>, bool),
    error: &Error,
) {
    assert!(failed.is_some(), "{error:?} without a failure, {cell:?}");
    if is_pair {
        return;
    }
    // What cannot be kept is read all the same.
    let is_kept = cell.change != Change::CopyOnRead || failed == Some(OpKind::Read);
    assert!(is_kept, "{error:?} of {failed:?}, {cell:?}");
    assert!(!fixture.place.path().join(OVERLAY).exists(), "an overlay is left, {cell:?}");
    if cell.shape == Shape::DataRaw {
        // It is used by itself, too.
        let len = world.victim(Victim::Data).len();
        assert_eq!(Bytes(len), disk.size(), "the data file has another length, {cell:?}");
    }
}

/// Runs one cell.
pub(super) async fn judge(ring: &Ring, fixture: &Fixture, cell: Cell) -> Run {
    let (mut world, disk, mut model) = begin(ring, fixture, cell).await;
    let frozen = frozen::Frozen::new(ring, &world, &disk, &model.a, cell).await;
    let (made, run, failed) = meet(ring, fixture, &world, &disk, &mut model, cell).await;
    if let Some(frozen) = frozen {
        // What is written behind the clients, who do not wait for it.
        loop {
            settle(ring).await;
            if world.release() == 0 {
                break;
            }
        }
        frozen.judge(ring, &disk, cell, run.reached).await;
    }
    let error = made.as_ref().err().filter(|_| !cell.change.is_refused_always());
    let is_refused = error.is_some();
    if let Some(error) = error {
        let failures = (failed, run.reached_again);
        check_refusal(fixture, &world, &disk, cell, failures, error);
    }
    if run.reached_again {
        let is_sound = after_two(ring, fixture, &disk, &mut model, cell, is_refused).await;
        settle(ring).await;
        let is_made = is_made(&disk, cell);
        drop(disk);
        look(ring, fixture, &world, &mut model, cell, (is_made, is_sound)).await;
        return run;
    }
    let may_fail_flushes = failed.is_some_and(|kind| {
        cell.injected == Injected::Io
            || cell.injected == Injected::NoSpace && matches!(kind, OpKind::Flush | OpKind::Read)
    });
    let mut is_open = !(made.is_ok() && cell.change == Change::Close);
    let mut is_sound = true;
    if is_open {
        model.settle(read_steps(ring, &disk, 1 << 20).await, &cell);
        // It takes writes as before.
        let probe = Effect { range: 15 * CLUSTER..16 * CLUSTER, byte: 0x41 };
        let written = write(ring, &disk, Some(probe.clone())).await;
        let fault = disk.fault();
        assert_eq!(written, Ok(()), "{fault:?} after {made:?}, {cell:?}");
        model.apply(&probe, true);
        let flushed = disk.flush(ring).await;
        is_sound = flushed.is_ok();
        assert!(is_sound || may_fail_flushes, "{flushed:?} {cell:?}");
        if is_sound && is_refused {
            // What was in the way is gone.
            world.renew_target(fixture);
            if cell.change == Change::MirrorNone {
                world.fill_target(&model.a);
            }
            let new = world.new_image();
            let again = cell.change.make(ring, &disk, fixture.place.path(), new).await;
            assert!(again.is_ok(), "{again:?} after {made:?}, {cell:?}");
            is_open = cell.change != Change::Close;
            changed(cell.change, fixture, &mut model);
        }
    }
    if is_open {
        model.settle(read_steps(ring, &disk, 1 << 20).await, &cell);
        let closed = disk.close(ring).await;
        let fault = disk.fault();
        assert!(closed.is_ok() || !is_sound, "{closed:?} {fault:?} after {made:?}, {cell:?}");
    }
    settle(ring).await;
    let is_made = is_made(&disk, cell);
    drop(disk);
    look(ring, fixture, &world, &mut model, cell, (is_made, is_sound)).await;
    run
}

/// After two failures: the disk may answer with errors until it is opened again, and a change may
/// be made of which an error was told; but what it shows is right. Returns whether all that clients
/// wrote is on the storage.
///
/// * `is_refused`: an error was told.
async fn after_two(
    ring: &Ring,
    fixture: &Fixture,
    disk: &Disk,
    model: &mut Model,
    cell: Cell,
    is_refused: bool,
) -> bool {
    let answers = disk.read(ring, 0, &IoBuf::new(512, 512)).await;
    let mut is_sound = true;
    match answers {
        Ok(_) => {
            let shown = read_steps(ring, disk, 1 << 20).await;
            may_be_made(fixture, model, cell, is_refused, &shown);
            model.settle(shown, &cell);
            is_sound = disk.flush(ring).await.is_ok();
        }
        Err(errno) => {
            let may_end = cell.change.refuses_requests();
            let is_broken = disk.fault().is_some() && errno == Errno::IO;
            assert!(is_broken || may_end && errno == Errno::BUSY, "{errno} {cell:?}");
        }
    }
    disk.close(ring).await.is_ok() && is_sound
}

/// The model of a change of which an error was told, where the disk shows that it was made.
fn may_be_made(fixture: &Fixture, model: &mut Model, cell: Cell, is_refused: bool, shown: &[u8]) {
    if !is_refused || shown.len() == model.a.len() && model.differs(shown).is_none() {
        return;
    }
    let mut made = model.clone();
    changed(cell.change, fixture, &mut made);
    let effects = [cell.request.effect()].into_iter().chain(later().map(Some));
    for effect in effects.flatten() {
        made.apply(&effect, false);
    }
    if shown.len() == made.a.len() {
        *model = made;
    }
}

/// Makes the change while a request is in flight and others come, with a failure in between. Gives
/// what became of the change, and the kind of the operation that failed.
async fn meet(
    ring: &Ring,
    fixture: &Fixture,
    world: &World,
    disk: &Arc<Disk>,
    model: &mut Model,
    cell: Cell,
) -> (Result<(), Error>, Run, Option<OpKind>) {
    let left = Rc::new(Slot::new(0));
    // The first client has to be in flight when the change begins.
    let lifted = disk.lift_limits();
    for (.., sim) in &world.storages {
        sim.on(When::any().once(), Fault::Hold);
    }
    let (handle, other) = (ring.clone(), Arc::clone(disk));
    let first = spawn(ring, &left, async move { cell.request.make(&handle, &other).await });
    settle(ring).await;
    drop(lifted);
    for (.., sim) in &world.storages {
        sim.clear_rules();
    }
    let victim = world.victim(cell.victim);
    let begin = victim.log().len() as u64;
    if cell.number != u64::MAX {
        victim.on(When::number(begin + cell.number), cell.injected.fault());
    }
    let second = cell.again.map(|more| begin + cell.number + 1 + more);
    if let Some(second) = second {
        victim.on(When::number(second), cell.injected.fault());
    }
    let (handle, other) = (ring.clone(), Arc::clone(disk));
    let (place, new) = (fixture.place.path().to_owned(), world.new_image());
    let change =
        spawn(ring, &left, async move { cell.change.make(&handle, &other, &place, new).await });
    settle(ring).await;
    world.release();
    let mut others = Vec::new();
    for effect in later() {
        let (handle, other) = (ring.clone(), Arc::clone(disk));
        let task = async move { write(&handle, &other, Some(effect)).await };
        others.push(spawn(ring, &left, task));
        settle(ring).await;
    }
    finish(ring, world, &left, &cell).await;
    victim.clear_rules();
    let log = victim.log();
    let failed = log.get(usize::try_from(begin.saturating_add(cell.number)).unwrap_or(usize::MAX));
    let failed = failed.map(|record| record.kind);
    let reached = failed.is_some();
    let reached_again = second.is_some_and(|number| log.len() as u64 > number);

    let first = first.take().expect("it has ended");
    let made = change.take().expect("it has ended");
    // The disk may be cut between the growth and the write of an append.
    let may_end =
        cell.change.refuses_requests() || cell.request == Request::Append && cell.change.cuts();
    // No failure of the fleecing file is one of a client, and none of a target before the disk has
    // switched over to it.
    let is_beside = match cell.victim {
        Victim::Fleece => true,
        Victim::Target => !is_made(disk, cell),
        _ => false,
    };
    let may_fail = reached && !is_beside;
    assert!(first.is_ok() || may_fail || may_end, "{first:?} {cell:?}");
    account(model, fixture, cell, disk, first.is_ok(), made.is_ok());
    for (effect, result) in later().iter().zip(others) {
        let result = result.take().expect("it has ended");
        let may_fail = may_fail || cell.change.refuses_requests();
        assert!(result.is_ok() || may_fail, "{result:?} {cell:?}");
        // A client that appends makes a change of the size, so others may come between that and
        // this change.
        let is_after = cell.request != Request::Append || cell.change != Change::Apply;
        model.apply(effect, result.is_ok() && is_after);
    }
    let failed = failed.filter(|_| cell.injected != Injected::Hold);
    (made, Run { operations: log.len() as u64 - begin, reached, reached_again }, failed)
}

/// What the first client and the change have done, in this order.
fn account(
    model: &mut Model,
    fixture: &Fixture,
    cell: Cell,
    disk: &Disk,
    is_first: bool,
    is_made: bool,
) {
    let appends = cell.request == Request::Append;
    let before = model.a.len();
    if appends && (is_first || disk.size() > Bytes::of(before)) {
        // It may come before the change and after it.
        model.resize(usize::try_from(disk.size()).expect("small").max(before));
    }
    if let Some(effect) = cell.request.effect() {
        model.apply(&effect, is_first && !appends);
    }
    if is_made {
        changed(cell.change, fixture, model);
    } else if cell.change.is_followed() {
        model.apply(&followed(), false);
    }
    if appends {
        // A snapshot that is applied, and a smaller size, may come before it or after it.
        model.resize(usize::try_from(disk.size()).expect("small"));
        if let Some(effect) = cell.request.effect() {
            model.apply(&effect, is_first && !cell.change.cuts());
        }
    }
}

fn changed(change: Change, fixture: &Fixture, model: &mut Model) {
    if change == Change::Apply {
        model.a.clone_from(&fixture.old);
        model.b.clone_from(&fixture.old);
    }
    if change.is_followed() {
        model.apply(&followed(), true);
    }
    model.resize(change.size(model.a.len()));
}

impl Change {
    /// Simulated storage has no descriptors.
    fn is_refused_always(self) -> bool {
        self == Change::HandOver
    }

    /// Requests that come after it are refused, until the disk is opened again.
    fn refuses_requests(self) -> bool {
        matches!(self, Change::Close | Change::Deactivate)
    }

    fn cuts(self) -> bool {
        matches!(self, Change::Apply | Change::Shrink)
    }
}

/// Whether the layers are others than before.
fn is_made(disk: &Disk, cell: Cell) -> bool {
    let layers = disk.layers();
    match cell.change.target() {
        Some(name) => layers[0].name().ends_with(name),
        // One more with an overlay, one or two less after a commit.
        None => layers.len() != cell.shape.depth(),
    }
}

/// Looks at the images that are left.
///
/// * `is_made`, `is_sound`: the layers are others than before; all that clients wrote is on the
///   storage.
async fn look(
    ring: &Ring,
    fixture: &Fixture,
    world: &World,
    model: &mut Model,
    cell: Cell,
    (is_made, is_sound): (bool, bool),
) {
    let place = fixture.place.path();
    let new = match cell.change {
        Change::External => Some(OVERLAY),
        change => change.target(),
    };
    let new = new.filter(|_| is_made);
    for (victim, name, sim) in &world.storages {
        if *victim == Victim::Overlay && new.is_none() || *victim == Victim::Fleece {
            continue;
        }
        let image = sim.image();
        if name.ends_with(".qcow2") {
            let report = check_bytes(image.as_slice()).expect("the image can be checked");
            assert_eq!(report.corruptions, 0, "{name}: {:?} {cell:?}", report.messages);
        }
        std::fs::write(place.join(name), image).expect("write");
    }
    let top = new.unwrap_or(cell.shape.top());
    let options = ImageOptions {
        read_only: true,
        format: top.ends_with(".raw").then_some(Format::Raw),
        ..Default::default()
    };
    let disk = open(ring, place.join(top), &options).await;
    let disk = disk.unwrap_or_else(|error| panic!("{error} {cell:?}"));
    let mut shown = read_steps(ring, &disk, 1 << 20).await;
    if is_sound {
        if cell.again.is_some() {
            may_be_made(fixture, model, cell, true, &shown);
            // A raw file could be made longer and not be cut again.
            let len = model.a.len();
            if cell.shape == Shape::Raw && shown.len() > len && shown[len..].iter().all(|b| *b == 0)
            {
                shown.truncate(len);
            }
        }
        model.settle(shown.clone(), &cell);
    }
    drop(disk);
    if cell.shape == Shape::DataRaw && is_sound && new.is_none() {
        let data = std::fs::read(place.join("data.bin")).expect("read");
        assert!(data.starts_with(&shown), "the data file does not read like the disk, {cell:?}");
        // A disk that is smaller is, also where its data file could not be cut.
        let may_be_longer = cell.change == Change::Shrink || cell.again.is_some();
        assert!(data.len() == shown.len() || may_be_longer, "{} bytes, {cell:?}", data.len());
    }
    if fixture.has_bitmap {
        bitmaps(ring, fixture, world, cell, is_made, is_sound).await;
    }
}

/// Each bitmap is valid if the image was closed, and has a bit for all that differs if it is valid.
async fn bitmaps(
    ring: &Ring,
    fixture: &Fixture,
    world: &World,
    cell: Cell,
    is_made: bool,
    is_sound: bool,
) {
    let is_valid = async |sim: &SimStorage| {
        let image = Qcow2::open(ring, sim.storage(), &Default::default()).await.expect("open");
        let mut bitmaps = image.info().bitmaps.iter();
        bitmaps.any(|bitmap| bitmap.name == BITMAP && !bitmap.in_use)
    };
    let is_committed = cell.change.is_commit() && is_made;
    if let Some((.., between)) = world.storages.iter().find(|(it, ..)| *it == Victim::Between)
        && is_committed
    {
        assert!(!is_valid(between).await, "what it belongs to has changed below it, {cell:?}");
    }
    let top = world.victim(Victim::Top);
    let valid = is_valid(top).await;
    if is_committed && cell.change != Change::CommitBelow {
        // What is written to the base is in no bitmap of the former top.
        assert!(!valid, "the bitmap claims to be true, {cell:?}");
        return;
    }
    // The former top is closed after a switch-over, and if that fails this is only said.
    let is_closed = matches!(cell.victim, Victim::Top | Victim::Data);
    let is_left = is_made && cell.change.switches_over() && is_closed;
    let may_be_lost = !is_sound || cell.again.is_some() || is_left;
    assert!(valid || may_be_lost, "the bitmap is lost, {cell:?}");
    if !valid {
        return;
    }
    let image = Qcow2::open(ring, top.storage(), &Default::default()).await.expect("open");
    let contents = image.bitmap_contents(ring, BITMAP).await.expect("the bitmap");
    let place = fixture.place.path().join(cell.shape.top());
    let options = ImageOptions { read_only: true, ..Default::default() };
    let disk = open(ring, place, &options).await.expect("open");
    let now = read_steps(ring, &disk, 1 << 20).await;
    let mut marked = vec![false; now.len()];
    for range in contents.ranges() {
        let (start, end) = (usize::try_from(range.start.0), usize::try_from(range.end.0));
        marked[start.expect("small")..end.expect("small")].fill(true);
    }
    let missing = (0..now.len())
        .find(|&at| !marked[at] && fixture.bytes.get(at).copied().unwrap_or(0) != now[at]);
    assert_eq!(missing.map(|at| at / CLUSTER), None, "cluster without a bit, {cell:?}");
}
