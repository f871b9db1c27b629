//! Runs one cell and judges what its clients see.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::Error;
use ringdisk_nbd::NamedDisk;
use ringdisk_nbd_protocol::numbers::{command, errno};
use ringdisk_nbd_protocol::request::Request;
use ringdisk_testkit::images;
use ringdisk_testkit::process::{LIMIT, patient, until};
use ringdisk_testkit::sim::{Fault, When};

use super::apply::Means;
use super::clients::{
    FIRST, LATER, LATER_BYTE, Range, STYLE, WORKERS, Worked, asked, bitmap, client, judge_reply,
    left_by, start, work,
};
use super::world::{Cell, Change, Fixture, Injected, Shape, Victim, World};
use crate::client::{Client, Server, data, options, request};

/// Time for the first request to reach a storage; some need none.
const REACHES: Duration = Duration::from_millis(2);

/// What is known about a run.
pub(super) struct Run {
    /// Operations of the victim while the change was made.
    pub(super) operations: u64,
    /// The operation that was to fail was made.
    pub(super) reached: bool,
}

/// What the disk may show.
struct Model<'a> {
    bytes: &'a [u8],
    /// In these ranges, which do not overlap, each byte is one of a few.
    may_be: Vec<(Range, Vec<u8>)>,
}

impl Model<'_> {
    /// * `is_sure`: it is there; else it may be there, in part or not at all.
    fn put(&mut self, range: Range, byte: u8, is_sure: bool) {
        let before = if is_sure { None } else { Some(self.bytes[range.start as usize]) };
        self.may_be.push((range, before.into_iter().chain([byte]).collect()));
    }

    fn judge(&self, shown: &[u8], cell: Cell) {
        let mut expected = self.bytes[..shown.len()].to_vec();
        for (range, bytes) in &self.may_be {
            let wrong = shown[range.indices()].iter().find(|byte| !bytes.contains(byte));
            assert_eq!(wrong, None, "of {bytes:?} at {}, {cell:?}", range.start);
            expected[range.indices()].copy_from_slice(&shown[range.indices()]);
        }
        assert_eq!(images::differs_at(shown, &expected), None, "differs at, {cell:?}");
    }
}

/// The clients of a cell, and what has become of their requests.
struct Clients {
    client: Client,
    writer: Client,
    first_done: bool,
    later_done: bool,
    workers: Vec<Worked>,
    /// Errors of all requests.
    errors: Vec<u32>,
}

/// Runs one cell.
pub(super) fn judge(fixture: &Fixture, cell: Cell) -> Run {
    let world = World::new(fixture, cell);
    let disk = Arc::clone(&world.disk);
    let named = NamedDisk { bitmaps: vec![bitmap()], ..NamedDisk::new("", disk) };
    let mut server = Server::start(vec![named], options(2));
    let mut first = client(&server, cell.request);
    // The request is in the storage when the change begins, if it needs that.
    world.own().for_each(|sim| sim.on(When::any().once(), Fault::Hold));
    let (request, payload) = asked(cell.request);
    first.start(STYLE, request, &payload);
    until(REACHES, || world.own().any(|sim| !sim.held().is_empty()).then_some(()));
    world.own().for_each(ringdisk_testkit::sim::SimStorage::clear_rules);
    let victim = world.victim(cell.victim);
    let begin = victim.log().len() as u64;
    if cell.number != u64::MAX {
        victim.on(When::number(begin + cell.number), cell.injected.fault());
    }
    let means = Means {
        disk: Arc::clone(&world.disk),
        beside: world.beside.clone(),
        bytes: fixture.bytes.clone().into(),
        is_in_middle: Arc::default(),
    };
    let its = means.clone();
    let changing = std::thread::spawn(move || its.make(cell.change));
    wait_for_middle(&world, &changing, &means.is_in_middle, cell);
    let (made, clients) = work_beside(&world, &server, fixture, changing, first, cell);
    victim.clear_rules();
    let operations = victim.log().len() as u64 - begin;
    let reached = operations > cell.number;
    let fails = reached && cell.injected != Injected::Hold;
    let may_fail = judge_errors(&world, &clients, fails, cell);
    if let Err(error) = &made {
        assert!(fails || cell.change.is_refused_always(), "{error:?} without a failure: {cell:?}");
    }
    let is_closed = made.is_ok() && cell.change == Change::Close;
    let clients = match is_closed {
        true => None,
        false => Some(go_on(fixture, &world, &server, clients, &means, (&made, may_fail), cell)),
    };
    drop(clients);
    let ended = server.stop();
    // A flush that failed is told again at the end.
    assert!(ended.is_ok() || fails || is_closed, "{ended:?} {cell:?}");
    Run { operations, reached }
}

/// Waits until clients may come, where a change is to have reached something first.
fn wait_for_middle(
    world: &World,
    changing: &JoinHandle<Result<(), Error>>,
    is_in_middle: &AtomicBool,
    cell: Cell,
) {
    if !matches!(cell.change, Change::Checkpoint | Change::MirrorNone) {
        return;
    }
    let begun = until(patient(LIMIT), || {
        world.release();
        (is_in_middle.load(Ordering::Acquire) || changing.is_finished()).then_some(())
    });
    assert!(begun.is_some(), "hangs: {cell:?}");
}

/// Clients work until the change is over, and all is answered.
fn work_beside(
    world: &World,
    server: &Server,
    fixture: &Fixture,
    changing: JoinHandle<Result<(), Error>>,
    mut client_of_first: Client,
    cell: Cell,
) -> (Result<(), Error>, Clients) {
    let mut writer = client(server, 0);
    let later = Request { cookie: 2, ..request(command::WRITE, LATER.start, LATER.len) };
    writer.start(STYLE, later, &vec![LATER_BYTE; LATER.len as usize]);
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let byte = fixture.bytes[work(worker).start as usize];
            start(client(server, 0), worker, byte, cell)
        })
        .collect();
    let is_over = until(patient(LIMIT), || {
        world.release();
        let are_done = workers.iter().all(JoinHandle::is_finished);
        (changing.is_finished() && are_done).then_some(())
    });
    assert!(is_over.is_some(), "hangs: {cell:?}");
    let made = changing.join().unwrap();
    world.release();
    let workers: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    let first = client_of_first.reply_of(STYLE, |_| 0);
    assert_eq!(first.cookie, 1, "{cell:?}");
    if first.error == 0 {
        judge_reply(&first, &fixture.bytes[FIRST.indices()], cell);
    }
    let second = writer.reply_of(STYLE, |_| 0);
    assert_eq!(second.cookie, 2, "{cell:?}");
    let errors = workers.iter().flat_map(|worker| &worker.errors).copied();
    let errors = [first.error, second.error].into_iter().chain(errors);
    let clients = Clients {
        errors: errors.filter(|error| *error != 0).collect(),
        client: client_of_first,
        writer,
        first_done: first.error == 0,
        later_done: second.error == 0,
        workers,
    };
    (made, clients)
}

/// A request fails only where an operation of the disk's own storage did, or the disk takes none.
/// Gives whether the former is so.
fn judge_errors(world: &World, clients: &Clients, fails: bool, cell: Cell) -> bool {
    let is_own = match cell.victim {
        Victim::Top | Victim::Between | Victim::Base => true,
        Victim::Fleece => false,
        // No failure of what is beside the disk is one of a client, until that is the disk.
        Victim::Overlay | Victim::Target => world.is_made(cell),
    };
    let is_refused = cell.change.refuses_requests();
    let may_fail = fails && is_own;
    let errors = &clients.errors;
    assert!(errors.is_empty() || may_fail || is_refused, "errors {errors:?} {cell:?}");
    let is_known = |error: &u32| [errno::EIO, errno::ENOSPC].contains(error) || is_refused;
    assert!(errors.iter().all(is_known), "errors {errors:?} {cell:?}");
    may_fail
}

/// All connections go on after the change: what was answered is there, also through those that were
/// open before; a change that was refused can be made again.
///
/// * `may_fail`: an operation of the disk's own storage has failed.
fn go_on(
    fixture: &Fixture,
    world: &World,
    server: &Server,
    mut clients: Clients,
    means: &Means,
    (made, may_fail): (&Result<(), Error>, bool),
    cell: Cell,
) -> Clients {
    let is_applied = cell.change == Change::Apply && made.is_ok();
    let bytes = if is_applied { &fixture.snapshot } else { &fixture.bytes };
    let mut model = Model { bytes, may_be: Vec::new() };
    if let Some(byte) = left_by(cell.request) {
        model.put(FIRST, byte, clients.first_done && !is_applied);
    }
    model.put(LATER, LATER_BYTE, clients.later_done && !is_applied);
    for (number, worker) in clients.workers.iter().enumerate() {
        model.may_be.push((work(number), worker.may_be.clone()));
    }
    let shown = shown(&mut clients.client, world, cell);
    model.judge(&shown, cell);
    let is_refused = made.is_err() && !cell.change.is_refused_always();
    let is_made_again = is_refused && world.disk.fault().is_none();
    if is_made_again {
        let beside = world.renewed(fixture, cell, &shown);
        let again = Means { beside, bytes: shown.into(), ..means.clone() };
        let made = std::thread::spawn(move || again.make(cell.change)).join().unwrap();
        assert!(made.is_ok(), "{made:?} again: {cell:?}");
        if cell.change == Change::Close {
            return clients;
        }
    }
    // A new one has the size of now.
    let mut newer = server.connect();
    newer.greet();
    newer.agree(STYLE);
    assert_eq!(newer.go("").size, world.disk.size().0, "{cell:?}");
    let is_made = made.is_ok() || is_made_again;
    let size = world.disk.size().0;
    let expected = if is_made { cell.change.size() } else { super::world::SIZE };
    assert!(size == expected || cell.change.is_refused_always(), "{size} bytes, {cell:?}");
    // What one connection writes every other one reads.
    let write = request(command::WRITE, LATER.start, 512);
    let error = newer.call(STYLE, write, &[0x33; 512]).error;
    if let Some(fault) = world.disk.fault() {
        // Where metadata or a flush failed, what needs new clusters does until it is opened again.
        assert!(may_fail && [0, errno::EIO].contains(&error), "{fault} {made:?} {cell:?}");
    } else {
        assert_eq!(error, 0, "{made:?} {cell:?}");
    }
    let others = clients.workers.iter_mut().map(|worker| &mut worker.client);
    for other in others.chain([&mut clients.client, &mut clients.writer]) {
        let reply = other.call(STYLE, request(command::READ, LATER.start, 512), &[]);
        let read = data(&reply, LATER.start, 512);
        assert!(error != 0 || read == [0x33; 512], "{cell:?}");
    }
    // And a flush on any of them covers it.
    let flushed = clients.writer.call(STYLE, request(command::FLUSH, 0, 0), &[]).error;
    if cell.shape == Shape::Raw && !world.is_made(cell) && flushed == 0 {
        assert_eq!(world.victim(Victim::Top).unflushed(), 0, "{cell:?}");
    }
    clients
}

/// What the disk shows to a client that has its former size.
fn shown(client: &mut Client, world: &World, cell: Cell) -> Vec<u8> {
    let (before, size) = (super::world::SIZE, world.disk.size().0);
    let len = before.min(size);
    let reply = client.call(STYLE, request(command::READ, 0, len), &[]);
    assert_eq!(reply.error, 0, "{reply:?} {cell:?}");
    if size < before {
        // Past the end there is nothing, whatever the client believes.
        let reply = client.call(STYLE, request(command::READ, size, 4096), &[]);
        assert_eq!(reply.error, errno::EINVAL, "{reply:?} {cell:?}");
    }
    data(&reply, 0, len as usize)
}
