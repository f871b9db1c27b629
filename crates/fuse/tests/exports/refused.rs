//! A step of the start over io_uring that the kernel refuses, at every place: the next lower
//! transport serves, once and with a reason; what was asked for by name is an error, and nothing
//! stays mounted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::mount::table;
use ringdisk_fuse::testing::{self, Forced};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, Refuse, RingMode, Transport, ZeroCopy};
use ringdisk_ring::Topology;
use ringdisk_testkit::limits::{UringParameter, needs, needs_root};

/// Entries of each queue whose CPU runs.
const DEPTH: usize = 3;

struct Place {
    path: PathBuf,
    _directory: tempfile::TempDir,
    _switch: UringParameter,
}

fn place() -> Option<Place> {
    if !needs_root() {
        return None;
    }
    let switch = UringParameter::set(true)?;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    let path = path.canonicalize().expect("a path");
    Some(Place { path, _directory: directory, _switch: switch })
}

fn start(
    place: &Place,
    (options, refuse): (ExportOptions, Refuse),
) -> Result<Export, ringdisk_fuse::Error> {
    let disk = Disk::null(&NullOptions {
        size: Bytes(1 << 20),
        read_zeroes: true,
        ..NullOptions::default()
    });
    let depth = u32::try_from(DEPTH).ok();
    let options =
        ExportOptions { common: CommonOptions::with_threads(2), queue_depth: depth, ..options };
    let options = ExportOptions { mountpoint: place.path.clone(), ..options };
    let forced = Forced { refuse: Some(refuse), ..Forced::default() };
    testing::start(disk, options, forced)
}

fn options(transport: Transport) -> ExportOptions {
    ExportOptions { transport, ..ExportOptions::new("") }
}

/// It serves, and its end leaves nothing.
fn assert_serves(place: &Place, export: Export) {
    let file = File::open(&place.path).expect("the file");
    let mut bytes = [1; 100_000];
    file.read_exact_at(&mut bytes, 12_345).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 0));
    drop(file);
    export.stop_handle().stop();
    export.wait().expect("a clean end");
    assert_eq!(table::at(&place.path).expect("readable"), None);
}

/// Entries that a mount has at most.
fn entries() -> usize {
    Topology::read().possible.len() * DEPTH
}

/// What the most is that this kernel gives.
fn most(place: &Place) -> RingMode {
    let export = start(place, (options(Transport::Uring), Refuse::Entry(usize::MAX)));
    let export = export.expect("rings");
    let mode = export.ring_mode().expect("rings");
    assert_serves(place, export);
    mode
}

#[test]
fn whichever_entry_is_refused_dev_serves_and_one_note_says_why() {
    let Some(place) = place() else { return };
    for entry in 0..entries() {
        let auto = options(Transport::Auto);
        let export =
            start(&place, (auto, Refuse::Entry(entry))).expect("it is served all the same");
        // A CPU that is offline has fewer entries: past the last one nothing is refused.
        let refused = export.transport() == Transport::Dev;
        assert!(refused || entry >= entries() - Topology::read().possible.len(), "{entry}");
        let notes = export.notes().iter().filter(|note| note.contains("served over /dev/fuse"));
        assert_eq!(notes.count(), usize::from(refused), "{entry}: {:?}", export.notes());
        assert_serves(&place, export);
    }
}

#[test]
fn whichever_entry_is_refused_rings_that_were_asked_for_are_an_error() {
    let Some(place) = place() else { return };
    for entry in [0, 1, entries() / 2, DEPTH, entries() - DEPTH] {
        let error = start(&place, (options(Transport::Uring), Refuse::Entry(entry)));
        let error = error.expect_err("refused").to_string();
        assert!(error.contains("refused a ring"), "{entry}: {error}");
        assert_eq!(table::at(&place.path).expect("readable"), None, "{entry}");
    }
}

#[test]
fn each_mode_that_is_refused_leads_to_the_one_below_it() {
    let Some(place) = place() else { return };
    let most = most(&place);
    let modes = [(RingMode::ZeroCopy, ZeroCopy::Auto), (RingMode::Pools, ZeroCopy::Off)];
    let mut refused = 0;
    for (mode, zero_copy) in modes.into_iter().filter(|(mode, _)| *mode <= most) {
        let auto = ExportOptions { zero_copy, ..options(Transport::Auto) };
        let export = start(&place, (auto, Refuse::Pools(mode))).expect("served");
        assert_eq!((export.transport(), export.ring_mode()), (Transport::Uring, mode.below()));
        assert_serves(&place, export);
        refused += 1;
    }
    let _ = needs("buffer pools (Linux 7.3) to refuse", refused > 0);
}

#[test]
fn zero_copy_that_was_asked_for_and_is_refused_is_an_error() {
    let Some(place) = place() else { return };
    let on = ExportOptions { zero_copy: ZeroCopy::On, ..options(Transport::Auto) };
    let error = start(&place, (on, Refuse::Pools(RingMode::ZeroCopy)));
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("no zero-copy"), "{error}");
    assert_eq!(table::at(&place.path).expect("readable"), None);
}
