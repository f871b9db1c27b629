//! Mounts that come and go, and clients and servers that are killed under load, on each transport:
//! what the machine keeps of them.
//!
//! A small part by itself; with `RINGDISK_FULL=1` a thousand mounts and a hundred kills of each
//! kind, and then also numbers of the whole machine, which says so little after a few mounts that
//! it would fail for what others do. Ends and moments are drawn with a fixed seed.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{UringParameter, full, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, STOP, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok_words, patient, pause, until};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::kept::{Kept, Machine};
use crate::common::tools::ringdisk;
use crate::common::{MIB, program, raw_image};

/// How long others may take to give back what they have taken meanwhile.
const SETTLED: Duration = Duration::from_secs(60);
const IMAGE: &str = "disk.img";
const IMAGE_BYTES: u64 = 16 * MIB;

/// A way for requests to travel.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    words: &'static [&'static str],
    is_newest: bool,
}

const DEV: Way = Way { name: "dev", words: &["--transport", "dev"], is_newest: false };
const URING: Way =
    Way { name: "uring", words: &["--transport", "uring", "--no-pools"], is_newest: false };
const POOLS: Way =
    Way { name: "pools", words: &["--transport", "uring", "--zero-copy", "off"], is_newest: true };
const ZERO_COPY: Way = Way {
    name: "zero-copy",
    words: &["--transport", "uring", "--zero-copy", "on"],
    is_newest: true,
};

/// Numbers that are the same in each run.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_of(&mut self, words: [&'static str; 3]) -> &'static str {
        words[usize::try_from(self.below(3)).expect("less than three")]
    }
}

/// A directory with an image, and what the machine had before.
struct Place {
    way: Way,
    directory: tempfile::TempDir,
    kept: Kept,
    machine: Machine,
    begun: Instant,
    draw: Draw,
    _switch: Option<UringParameter>,
    // Dropped last: numbers of the machine are of one test at a time.
    _turn: MutexGuard<'static, ()>,
}

impl Place {
    /// `None`, with a word, where this machine does not have that way.
    fn new(way: Way) -> Option<Place> {
        if !needs_root() {
            return None;
        }
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let switch = match way.name {
            "dev" => None,
            _ => Some(UringParameter::set(true)?),
        };
        if way.is_newest && !needs("buffer pools (Linux 7.3)", crate::common::kernel_is(7, 3)) {
            return None;
        }
        let (directory, image) = raw_image(IMAGE_BYTES, 1);
        assert!(image.ends_with(IMAGE));
        let mut place = Place {
            way,
            directory,
            kept: Kept::default(),
            machine: Machine::now(),
            begun: Instant::now(),
            draw: Draw(1),
            _switch: switch,
            _turn: turn,
        };
        // The first one makes directories that stay.
        let first = place.serve(0);
        place.end(first, 0);
        place.machine = Machine::now();
        place.begun = Instant::now();
        Some(place)
    }

    fn serve(&mut self, round: usize) -> Mounted {
        let path = self.directory.path().join(format!("disk{round}"));
        let mut words = command(&[&program(), "mount", "-f", "raw"]);
        words.args(self.way.words).arg(self.directory.path().join(IMAGE)).arg(&path);
        let disk = Mounted::from_command(&mut words, &path);
        self.kept.saw(mount_at(&path).expect("mounted").minor);
        disk
    }

    /// Ends a mount in one of the usual ways.
    fn end(&mut self, disk: Mounted, round: usize) {
        let path = disk.path().to_owned();
        let finished = match self.draw.below(4) {
            0 => {
                ok_words(&["umount", text(&path)]);
                disk.finish()
            }
            1 => {
                ok_words(&[&program(), "umount", text(&path)]);
                disk.finish()
            }
            2 => disk.stop_by(Signal::INT),
            _ => disk.stop(),
        };
        assert_eq!(finished.code(), Some(0), "{round}: {}", finished.output());
        assert_eq!(mount_at(&path), None, "{round}");
        std::fs::remove_file(&path).expect("a mountpoint of ours");
    }

    /// The end: nothing is left; after many mounts, also by the numbers of the machine.
    fn assert_nothing_kept(mut self, what: &str, mounts: usize) {
        let last = self.serve(usize::MAX);
        self.end(last, usize::MAX);
        self.kept.assert_nothing(self.directory.path(), &[IMAGE]);
        let took = self.begun.elapsed();
        assert!(self.kept.numbers() < mounts / 2 + 20, "{:?}", self.kept);
        let more = || Machine::now().since(&self.machine);
        eprintln!(
            "{}: {mounts} {what} in {took:.1?}; the machine has more: {:?}",
            self.way.name,
            more()
        );
        // Less than one file and 64 KiB of slab for each mount; the rings of one are at least twice
        // the rest. What others do for a while is waited for.
        let is_little =
            |it: Machine| it.files < 800 && it.slab_kib < 64 << 10 && it.other_kib < 100 << 10;
        let limit = if mounts < 1000 { Duration::ZERO } else { SETTLED };
        let settled = until(limit, || is_little(more()).then_some(()));
        assert!(settled.is_some() || mounts < 1000, "{:?}", more());
    }

    /// Many requests at once, until it is killed or has an error.
    fn client(&mut self, disk: &Path) -> Process {
        let file = format!("--filename={}", text(disk));
        let rw = self.draw.one_of(["--rw=randrw", "--rw=randread", "--rw=randwrite"]);
        let bytes = self.draw.one_of(["--bs=4k", "--bs=64k", "--bs=1m"]);
        let words = ["fio", "--name=k", "--direct=1", "--iodepth=32", "--size=16m", "--numjobs=2"];
        let more = ["--time_based", "--runtime=60", "--ioengine=libaio", "--thread"];
        let mut client =
            Process::spawn(&mut command(&[&words[..], &more, &[&file, rw, bytes]].concat()));
        client.has_begun(disk);
        pause(Duration::from_millis(self.draw.below(50)));
        assert!(client.ended().is_none(), "{}", client.output());
        client
    }
}

/// How many of them: a part of `small` on an emulated machine, where each takes seconds.
fn count(small: usize, all: usize) -> usize {
    let is_emulated = patient(Duration::from_secs(1)) > Duration::from_secs(1);
    match (full(), is_emulated) {
        (true, _) => all,
        (false, true) => small.div_ceil(2),
        (false, false) => small,
    }
}

fn mounts(way: Way) {
    let Some(mut place) = Place::new(way) else { return };
    let mounts = count(30, 1000);
    for round in 0..mounts {
        let disk = place.serve(round);
        let offset = place.draw.below(IMAGE_BYTES - 5000);
        assert_eq!(piece(disk.path(), offset, 5000), pattern(1, offset, 5000), "{round}");
        place.end(disk, round);
    }
    place.assert_nothing_kept("mounts", mounts);
}

fn killed_servers(way: Way) {
    let Some(mut place) = Place::new(way).filter(|_| needs("fio", has("fio"))) else { return };
    let kills = count(5, 100);
    for round in 0..kills {
        let mut disk = place.serve(0);
        let mut client = place.client(disk.path());
        disk.process().signal(Signal::KILL);
        let ended = client.wait(LIMIT);
        assert!(ended.is_some_and(|status| !status.success()), "{round}: {ended:?}");
        assert!(disk.process().wait(STOP).is_some(), "{round}");
    }
    std::fs::remove_file(place.directory.path().join("disk0")).expect("a mountpoint of ours");
    place.assert_nothing_kept("servers killed", kills);
}

fn killed_clients(way: Way) {
    let Some(mut place) = Place::new(way).filter(|_| needs("fio", has("fio"))) else { return };
    let kills = count(5, 100);
    let disk = place.serve(0);
    for round in 0..kills {
        let mut client = place.client(disk.path());
        let group = Pid::from_raw(i32::try_from(client.pid()).expect("a pid")).expect("not 0");
        kill_process_group(group, Signal::KILL).expect("a client");
        assert!(client.wait(LIMIT).is_some(), "{round}: a killed client does not end");
        assert_eq!(piece(disk.path(), 0, 16).len(), 16, "{round}");
    }
    // Requests of the dead have all come back.
    let idle = until(STOP, || {
        let stats = ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json();
        let queues = stats["queues"].as_array().expect("queues").clone();
        queues.iter().all(|queue| queue["in-flight"] == 0).then_some(())
    });
    assert!(idle.is_some());
    place.end(disk, kills);
    place.assert_nothing_kept("clients killed", kills);
}

macro_rules! on_each_way {
    ($($module:ident: $way:expr;)*) => { $(
        mod $module {
            #[test]
            fn mounts_leave_nothing_behind() {
                super::mounts($way);
            }

            #[test]
            fn servers_killed_under_load_leave_nothing_behind() {
                super::killed_servers($way);
            }

            #[test]
            fn clients_killed_under_load_leave_nothing_behind() {
                super::killed_clients($way);
            }
        }
    )* };
}

on_each_way! {
    over_dev: super::DEV;
    over_uring: super::URING;
    over_pools: super::POOLS;
    with_zero_copy: super::ZERO_COPY;
}
