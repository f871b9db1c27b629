//! Each kind of damage to each pointer of an image: to each structure, past the end, unaligned,
//! with reserved bits; and a file that ends before each structure. A check names it, a repair makes
//! the image clean or says why not, loses nothing that could be read before, gives nothing back
//! that a damaged entry may have named, and QEMU agrees with the outcome.

use ringdisk_qcow2::{CheckReport, CheckVerdict, OpenOptions, Qcow2, Repair, check_bytes};
use ringdisk_ring::Runtime;
use ringdisk_testkit::layout::Layout;
use ringdisk_testkit::sim::SimStorage;

use crate::check::{Theirs, repair_on};
use crate::common::{Images, MIB, read, runtime};

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// Type of the bitmaps extension.
const BITMAPS: u32 = 0x2385_2875;

/// What an image is like that is damaged.
#[derive(Clone, Copy, Debug)]
struct Shape {
    options: &'static str,
    cluster: u64,
    size: u64,
    entry_bytes: u64,
    bitmaps: bool,
}

/// The first one in each run, the others with `RINGDISK_FULL=1`.
const SHAPES: [Shape; 3] = [
    Shape {
        options: "cluster_size=4k",
        cluster: 4096,
        size: 4 * MIB,
        entry_bytes: 8,
        bitmaps: true,
    },
    Shape {
        options: "cluster_size=4k,compat=0.10",
        cluster: 4096,
        size: 4 * MIB,
        entry_bytes: 8,
        bitmaps: false,
    },
    Shape {
        options: "cluster_size=16k,extended_l2=on",
        cluster: 16384,
        size: 32 * MIB,
        entry_bytes: 16,
        bitmaps: true,
    },
];

fn shapes() -> &'static [Shape] {
    let count = if std::env::var_os("RINGDISK_FULL").is_some() { SHAPES.len() } else { 1 };
    &SHAPES[..count]
}

impl Shape {
    /// An image with everything in it: two L2 tables, a snapshot with tables of its own, two
    /// bitmaps.
    fn make(&self, images: &Images) -> Vec<u8> {
        let (cluster, far) = (self.cluster, self.size / 4 * 3);
        images.create("all", self.options, self.size);
        let first = [
            format!("write -q -P 1 0 {}", 10 * cluster),
            format!("write -q -P 2 {far} {}", 6 * cluster),
        ];
        images.qemu_io("all", &first);
        images.qemu_img(&["snapshot", "-c", "one", "all"]);
        if self.bitmaps {
            images.qemu_img(&["bitmap", "--add", "all", "first"]);
            images.qemu_img(&["bitmap", "--add", "-g", "64k", "all", "second"]);
        }
        let second = [
            format!("write -q -P 3 {cluster} {}", 2 * cluster),
            format!("write -q -P 4 {far} {cluster}"),
        ];
        images.qemu_io("all", &second);
        std::fs::read(images.path("all")).expect("the image")
    }

    fn places(&self, bytes: &[u8]) -> Places {
        let (l1, refcounts, snapshots) = (word(bytes, 40), word(bytes, 48), word(bytes, 64));
        let l2 = word(bytes, l1) & OFFSET_MASK;
        let saved = word(bytes, snapshots);
        let mut structures = vec![
            ("the header", 0),
            ("the refcount table", refcounts),
            ("a refcount block", word(bytes, refcounts)),
            ("the L1 table", l1),
            ("an L2 table", word(bytes, l1 + 8) & OFFSET_MASK),
            ("the snapshot table", snapshots),
            ("the L1 table of the snapshot", saved),
            ("an L2 table of the snapshot", word(bytes, saved) & OFFSET_MASK),
        ];
        let pointer = |name, at, irreplaceable| Pointer { name, at, irreplaceable };
        let mut pointers = vec![
            pointer("an L1 entry", l1, true),
            pointer("an L2 entry", l2 + self.entry_bytes, true),
            pointer("an L1 entry of the snapshot", saved, true),
            pointer("the snapshot's L1 table", snapshots, true),
            pointer("an entry of the refcount table", refcounts, false),
        ];
        if self.bitmaps {
            let found = bytes[..1024].windows(4).position(|w| w == BITMAPS.to_be_bytes());
            let extension = found.expect("bitmaps") as u64 + 8;
            let directory = word(bytes, extension + 16);
            let table = word(bytes, directory);
            structures.extend([
                ("the bitmap directory", directory),
                ("a bitmap table", table),
                ("the bits of a bitmap", word(bytes, table)),
            ]);
            pointers.extend([
                pointer("the bitmap directory", extension + 16, false),
                pointer("a bitmap table", directory, false),
                pointer("an entry of a bitmap table", table, false),
            ]);
        }
        Places { structures, pointers }
    }

    /// The disk cluster by cluster; `None`: cannot be read.
    fn contents(&self, runtime: &mut Runtime, bytes: &[u8]) -> Vec<Option<Vec<u8>>> {
        let ring = runtime.ring().clone();
        let sim = SimStorage::from_image(bytes, 1);
        runtime.block_on(async {
            let opened = Qcow2::open(&ring, sim.storage(), &OpenOptions::default()).await;
            let mut all = Vec::new();
            for at in (0..self.size).step_by(self.cluster as usize) {
                all.push(match &opened {
                    Ok(image) => read(&ring, image, &[], at, self.cluster as usize).await.ok(),
                    Err(_) => None,
                });
            }
            all
        })
    }
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

/// A pointer: where it stands, and what it is.
#[derive(Clone, Copy, Debug)]
struct Pointer {
    name: &'static str,
    at: u64,
    /// What it names may be lost for good when it is given back.
    irreplaceable: bool,
}

/// The structures of the image and the pointers to them.
struct Places {
    structures: Vec<(&'static str, u64)>,
    pointers: Vec<Pointer>,
}

/// What is promised of one damaged image.
struct Case<'a> {
    shape: &'a Shape,
    name: String,
    bytes: Vec<u8>,
    /// A cluster that must not be given back.
    kept: Option<u64>,
    images: &'a Images,
}

impl Case<'_> {
    /// Checks, repairs and looks again. Returns whether the image is sound afterwards.
    fn judge(&self, runtime: &mut Runtime) -> bool {
        let name = &self.name;
        let before = self.shape.contents(runtime, &self.bytes);
        match check_bytes(&self.bytes[..]) {
            Ok(report) => {
                let verdict = report.verdict();
                assert!(
                    verdict == CheckVerdict::Corrupt || verdict == CheckVerdict::Failed,
                    "{name}: {}",
                    brief(&report)
                );
            }
            Err(error) => assert!(!error.to_string().contains("ringdisk check"), "{name}: {error}"),
        }
        let leaks = SimStorage::from_image(&self.bytes, 1);
        if repair_on(runtime, &leaks, Repair::Leaks).is_ok() {
            self.keeps(&leaks.image(), "a repair of leaks");
        }
        let sim = SimStorage::from_image(&self.bytes, 1);
        let repaired = repair_on(runtime, &sim, Repair::All);
        let after = sim.image();
        for (at, (old, new)) in before.iter().zip(self.shape.contents(runtime, &after)).enumerate()
        {
            assert!(old.is_none() || *old == new, "{name}: cluster {at} of the disk changed");
        }
        let Ok(report) = repaired else {
            assert!(after == self.bytes, "{name}: an error, and yet the image changed");
            return false;
        };
        let said = report
            .messages
            .iter()
            .any(|text| text.starts_with("Not repaired") || text.starts_with("Left after"));
        assert!(report.is_clean() || said, "{name}: {}", brief(&report));
        self.keeps(&after, &brief(&report));
        std::fs::write(self.images.path("repaired"), &after).expect("a copy");
        let theirs = Theirs::of(&self.images.path("repaired"));
        let code = i32::from(report.verdict().exit_code());
        let agrees = theirs.code == code || report.own_findings > 0 && code == 2;
        assert!(
            agrees,
            "{name}: {code}, and QEMU says {}: {:.300}\n{}",
            theirs.code,
            theirs.log,
            brief(&report)
        );
        report.is_clean()
    }

    /// What must not be given back was not.
    fn keeps(&self, after: &[u8], said: &str) {
        let Some(kept) = self.kept else { return };
        let refcount = Layout::of(after).refcounts.get(&(kept / self.shape.cluster)).copied();
        let name = &self.name;
        assert!(
            refcount.is_some_and(|count| count > 0),
            "{name}: {kept:#x} was given back: {said}"
        );
    }
}

/// The numbers of a report and the first of its messages.
fn brief(report: &CheckReport) -> String {
    let first: Vec<&String> = report.messages.iter().take(5).collect();
    format!("{} corruptions, {} leaks: {first:#?}", report.corruptions, report.leaks)
}

fn put(good: &[u8], at: u64, value: u64) -> Vec<u8> {
    let mut bytes = good.to_vec();
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
    bytes
}

#[test]
fn every_pointer_to_everything_that_it_must_not_name_is_damage() {
    let mut runtime = runtime();
    for shape in shapes() {
        let images = Images::new();
        let good = shape.make(&images);
        assert!(check_bytes(&good[..]).expect("a good image").is_clean());
        let Places { structures, pointers } = shape.places(&good);
        let mut sound = 0;
        for pointer in &pointers {
            for (what, value, kept) in damages(shape, &good, pointer, &structures) {
                let name = format!("{}: {} {what}", shape.options, pointer.name);
                let bytes = put(&good, pointer.at, value);
                let case = Case { shape, name, bytes, kept, images: &images };
                sound += u64::from(case.judge(&mut runtime));
            }
        }
        assert!(sound >= 10, "only {sound} images were made sound");
    }
}

/// What is done to a pointer, the word that it becomes, and what must not be given back.
fn damages(
    shape: &Shape,
    good: &[u8],
    pointer: &Pointer,
    structures: &[(&'static str, u64)],
) -> Vec<(String, u64, Option<u64>)> {
    let old = word(good, pointer.at);
    let (target, flags) = (old & OFFSET_MASK, old & !OFFSET_MASK);
    let past = (good.len() as u64).next_multiple_of(shape.cluster) + 16 * shape.cluster;
    let kept = pointer.irreplaceable.then_some(target);
    let mut all = Vec::new();
    for (what, at) in structures {
        // A snapshot's table of the second level may be the active one too, and an offset of 0 is
        // none.
        let shared = what.starts_with("an L2 table") && pointer.name.starts_with("an L1 entry");
        if *at != target && *at != 0 && !shared {
            all.push((format!("names {what}"), at | flags, kept));
        }
    }
    all.push(("names a place past the end".to_owned(), past | flags, kept));
    all.push(("names a place far past the end".to_owned(), (1 << 50) | flags, kept));
    all.push(("is not aligned".to_owned(), (target + 512) | flags, kept));
    // Fields of the header extension and the directories have no reserved bits: a place far away.
    all.push(("has reserved bits".to_owned(), old | 1 << 57, kept));
    all
}

#[test]
fn a_file_that_ends_before_any_structure_is_damaged_and_gives_nothing_back() {
    let mut runtime = runtime();
    for shape in shapes() {
        let images = Images::new();
        let good = shape.make(&images);
        for (what, at) in shape.places(&good).structures.into_iter().filter(|(_, at)| *at != 0) {
            // Before it, inside its first word, and inside its cluster.
            for len in [at, at + 4, at + 520].into_iter().filter(|len| *len < good.len() as u64) {
                let bytes = good[..len as usize].to_vec();
                let name = format!("{}: the file ends at {len:#x}, in {what}", shape.options);
                Case { shape, name, bytes, kept: None, images: &images }.judge(&mut runtime);
            }
        }
    }
}

#[test]
fn entries_with_refcounts_that_agree_are_damage_all_the_same() {
    let mut runtime = runtime();
    for shape in shapes() {
        let images = Images::new();
        let good = shape.make(&images);
        let Places { structures, pointers } = shape.places(&good);
        let block = word(&good, word(&good, 48));
        let entry = pointers.iter().find(|pointer| pointer.name == "an L2 entry").expect("there");
        assert!(COPIED & word(&good, entry.at) != 0, "the entry was the image's own");
        for (what, at) in structures.iter().filter(|(_, at)| *at != 0) {
            // As after a repair by QEMU: two references, no COPIED flag.
            let mut bytes = put(&good, entry.at, *at);
            bytes[(block + at / shape.cluster * 2) as usize + 1] += 1;
            let kept = Some(word(&good, entry.at) & OFFSET_MASK);
            let name = format!("{}: an L2 entry names {what}, counted twice", shape.options);
            Case { shape, name, bytes, kept, images: &images }.judge(&mut runtime);
        }
    }
}
