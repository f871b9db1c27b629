//! Snapshots and commits, one after the other, while clients write and read: each succeeds, no
//! request fails, and the server holds no more afterwards than before.
//!
//! A small part by itself; with `RINGDISK_FULL=1` a thousand of each. Which change comes next is
//! drawn with a fixed seed. The last line of its output has what was measured.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, assert_clean, pattern};
use ringdisk_testkit::limits::{Holds, full, needs_root, resident_bytes};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, until};
use ringdisk_testkit::sim::Prng;

use crate::common::tools::ringdisk;
use crate::common::{Aligned, BLOCK, MIB, open_direct, serve};
use crate::keep::client::{get_on, judge, load};

/// Bytes that the clients work on; behind them is the block of the client that measures.
const SPAN: u64 = 12 * MIB;
const CLIENTS: u64 = 4;
/// Most images of the disk.
const DEPTH_MAX: usize = 5;
/// Commits after which the server has everything that it keeps for the next ones.
const WARM: u64 = 10;
/// More memory than that is a leak; queue threads take buffers for bursts of requests.
const GROWTH_MAX: u64 = 32 * MIB;

fn rounds() -> u64 {
    if full() { 1000 } else { 40 }
}

/// The images of the disk, from the base up.
struct Chain {
    directory: PathBuf,
    images: Vec<PathBuf>,
    snapshots: u64,
    commits: u64,
}

impl Chain {
    fn next(&self) -> PathBuf {
        self.directory.join(format!("{}.qcow2", self.snapshots))
    }

    /// Makes one change: a snapshot, a commit of the top, or one of an image below it.
    fn change(&mut self, disk: &Mounted, prng: &mut Prng) {
        let ctl = |words: &[&str]| {
            ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat()).ok();
        };
        let depth = self.images.len();
        let may_grow = self.snapshots < rounds() && depth < DEPTH_MAX;
        if depth == 1 || may_grow && prng.coin() {
            self.snapshots += 1;
            let new = self.next();
            ctl(&["snapshot", text(&new)]);
            self.images.push(new);
            return;
        }
        let at = 1 + usize::try_from(prng.below(depth as u64 - 1)).expect("small");
        let [base, merged] = [at - 1, at].map(|at| text(&self.images[at]));
        if at + 1 == depth {
            ctl(&["commit", "--quiet"]);
        } else {
            ctl(&["commit", "--quiet", "--top", merged, "--base", base]);
        }
        self.commits += 1;
        fs::remove_file(self.images.remove(at)).expect("nobody needs it");
    }
}

/// Reads one block again and again. Gives how long each read took.
fn measure(disk: &Path, is_over: &AtomicBool) -> Vec<Duration> {
    let file = open_direct(disk);
    let expected = pattern(3, SPAN, BLOCK);
    let mut took = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let mut seen = Aligned::new(BLOCK);
        let begun = Instant::now();
        file.read_exact_at(seen.bytes_mut(), SPAN).expect("a read");
        took.push(begun.elapsed());
        assert!(seen.bytes() == expected, "another block");
        std::thread::sleep(Duration::from_millis(1));
    }
    took.sort();
    took
}

/// Is told of its end also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn snapshots_and_commits_follow_one_another_under_clients_without_an_error() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let base = directory.path().join("0.qcow2");
    images::qcow2(&base, "16M", "cluster_size=64k");
    let disk = serve(&base, &[]);
    open_direct(disk.path())
        .write_all_at(Aligned::of(&pattern(3, SPAN, BLOCK)).bytes(), SPAN)
        .expect("write");
    let mut chain = Chain {
        directory: directory.path().to_owned(),
        images: vec![base.clone()],
        snapshots: 0,
        commits: 0,
    };
    let mut prng = Prng::new(19);
    let is_over = AtomicBool::new(false);
    let (mut warm, mut took) = (None, Vec::new());
    let begun = Instant::now();
    let written = load(disk.path(), SPAN, CLIENTS, |done| {
        std::thread::scope(|scope| {
            let measures = scope.spawn(|| measure(disk.path(), &is_over));
            {
                let _over = Over(&is_over);
                while chain.commits < rounds() {
                    get_on(done, CLIENTS, || disk.output());
                    chain.change(&disk, &mut prng);
                    if chain.images.len() == 1 && chain.commits >= WARM && warm.is_none() {
                        warm = Some((Holds::of(disk.pid()), resident_bytes(disk.pid())));
                    }
                }
            }
            took = measures.join().expect("the client that measures");
        });
    });
    let lasted = begun.elapsed();
    assert_eq!(chain.snapshots, rounds());
    assert_eq!(chain.images, std::slice::from_ref(&base));
    judge(disk.path(), &written);
    let (before, memory) = warm.expect("the base was alone once");
    // The last connection of a command may live for a moment.
    let fits = || (Holds::of(disk.pid()).descriptors <= before.descriptors).then_some(());
    until(LIMIT, fits).unwrap_or_else(|| panic!("{before:?}, and now {:?}", Holds::of(disk.pid())));
    let grown = resident_bytes(disk.pid()).saturating_sub(memory);
    assert!(grown < GROWTH_MAX, "{grown} bytes more than after {WARM} commits");
    println!(
        "{} snapshots and {} commits in {:.1} s; {} reads, median {:?}, 99th percentile {:?}, \
         longest {:?}; {} descriptors before and after; {} KiB more memory",
        chain.snapshots,
        chain.commits,
        lasted.as_secs_f64(),
        took.len(),
        took[took.len() / 2],
        took[took.len() * 99 / 100],
        took[took.len() - 1],
        before.descriptors,
        grown >> 10
    );
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&base);
    let again = serve(&base, &["--read-only"]);
    judge(again.path(), &written);
    assert_eq!(again.stop().code(), Some(0));
}
