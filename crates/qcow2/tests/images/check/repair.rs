//! Repair of damaged images: it ends, QEMU agrees with the verdict, nothing gets worse.

use ringdisk_qcow2::{CheckVerdict, Repair, check_bytes};
use ringdisk_testkit::sim::{Prng, SimStorage};

use crate::check::damage::damage;
use crate::check::{Theirs, repair_on, seeds, shapes};
use crate::common::{Images, runtime};

/// The contents as QEMU reads them; `None`: it does not.
fn contents(images: &Images, name: &str) -> Option<Vec<u8>> {
    let raw = images.path("contents.raw");
    let status = std::process::Command::new("qemu-img")
        .args(["convert", "-q", "-f", "qcow2", "-O", "raw", name, "contents.raw"])
        .current_dir(images.0.path())
        .stderr(std::process::Stdio::null())
        .status()
        .expect("qemu-img is needed for this test");
    status.success().then(|| std::fs::read(raw).expect("the converted image"))
}

/// Worse is greater.
pub(crate) fn rank(verdict: CheckVerdict) -> u8 {
    match verdict {
        CheckVerdict::Clean => 0,
        CheckVerdict::Leaks => 1,
        CheckVerdict::Corrupt => 2,
        CheckVerdict::Failed => 3,
    }
}

#[test]
fn a_repair_makes_nothing_worse_and_qemu_agrees_with_its_verdict() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    for seed in seeds(80) {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let repair = if seed % 3 == 0 { Repair::Leaks } else { Repair::All };
        let case = format!("seed {seed}: {repair:?} of {name} with {what:?}");
        std::fs::write(images.path("damaged"), &bytes).expect("a copy");
        let before = contents(&images, "damaged");
        let sim = SimStorage::from_image(&bytes, seed);
        let Ok(report) = repair_on(&mut runtime, &sim, repair) else {
            assert!(sim.image() == bytes, "{case}");
            continue;
        };
        let repaired = sim.image();
        std::fs::write(images.path("damaged"), &repaired).expect("a copy");
        let theirs = Theirs::of(&images.path("damaged"));
        let first = check_bytes(&bytes[..]).expect("it could be repaired");
        let code = i32::from(report.verdict().exit_code());
        let agrees = code == theirs.code || report.own_findings > 0 && code == 2;
        assert!(agrees, "{case}\n{report:?}\n{}", theirs.log);
        assert!(rank(report.verdict()) <= rank(first.verdict()), "{case}\n{first:?}\n{report:?}");
        assert!(report.corruptions <= first.corruptions, "{case}\n{first:?}\n{report:?}");
        assert_eq!(report.corruptions_fixed, first.corruptions - report.corruptions, "{case}");
        // Only entries that say two things at once lose what they say.
        let emptied = report.messages.iter().any(|text| text.contains("read as zeroes now"));
        if let (Some(before), false) = (before, emptied) {
            assert!(contents(&images, "damaged") == Some(before), "{case}: the contents changed");
        }
    }
}

#[test]
fn a_second_repair_finds_nothing_more_to_do() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    for seed in 0..200 {
        let mut prng = Prng::new(seed);
        let (_, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let sim = SimStorage::from_image(&bytes, seed);
        if repair_on(&mut runtime, &sim, Repair::All).is_ok_and(|report| report.is_clean()) {
            let repaired = sim.image();
            let again = repair_on(&mut runtime, &sim, Repair::All).expect("a clean image");
            let case = format!("seed {seed} {what:?}: {again:?}");
            assert_eq!((again.corruptions_fixed, again.leaks_fixed), (0, 0), "{case}");
            assert!(again.is_clean() && sim.image() == repaired, "{case}");
        }
    }
}

#[test]
fn rubbish_ends_with_a_verdict() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    for seed in 0..300 {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let mut bytes = good.clone();
        // A sound header, and random words all over the first clusters, where the metadata lies.
        for _ in 0..(1 << (seed % 10)) {
            let span = (bytes.len() / 8).min(1 << 16) as u64;
            let at = 128 + (prng.next_u64() % (span - 32)) as usize * 8 / 8 * 8;
            let word = match prng.next_u64() % 4 {
                0 => prng.next_u64(),
                1 => 1 << 63 | (prng.next_u64() % bytes.len() as u64) & !511,
                2 => (prng.next_u64() % bytes.len() as u64) & !511,
                _ => 1 << 62 | prng.next_u64(),
            };
            if let Some(target) = bytes.get_mut(at..at + 8) {
                target.copy_from_slice(&word.to_be_bytes());
            }
        }
        let sim = SimStorage::from_image(&bytes, seed);
        let before = check_bytes(&bytes[..]);
        let result = repair_on(&mut runtime, &sim, Repair::All);
        match (before, result) {
            (Ok(before), Ok(after)) => {
                assert!(after.corruptions <= before.corruptions, "seed {seed}, {name}");
            }
            (_, Err(error)) => assert!(sim.image() == bytes, "seed {seed}, {name}: {error}"),
            (Err(error), Ok(_)) => panic!("seed {seed}, {name}: first {error}, then repaired"),
        }
    }
}
