//! The same verdict and the same numbers as QEMU.

use ringdisk_qcow2::{CheckHooks, CheckOptions, check, check_bytes};
use ringdisk_testkit::sim::Prng;

use crate::check::damage::damage;
use crate::check::{Theirs, numbers, seeds, shapes};
use crate::common::{Images, runtime, storage};

#[test]
fn sound_images_of_all_shapes_are_clean_with_qemus_numbers() {
    let images = Images::new();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    for (name, bytes) in shapes::make(&images) {
        let theirs = Theirs::of(&images.path(name));
        let options = CheckOptions::default();
        let file = storage(&images.path(name));
        let checked = check(&ring, &file, None, &options, CheckHooks::none());
        let report = runtime.block_on(checked).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(report.is_clean() && report.messages.is_empty(), "{name}: {report:?}");
        assert_eq!(theirs.code, 0, "{name}: {}", theirs.log);
        for (key, ours) in numbers(&report) {
            assert_eq!(ours, theirs.number(key), "{name}: {key}");
        }
        assert_eq!(check_bytes(&bytes[..]).expect("a good image"), report, "{name}");
    }
}

#[test]
fn damaged_images_have_qemus_verdict_and_numbers() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    for seed in seeds(120) {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let path = images.path("damaged");
        std::fs::write(&path, &bytes).expect("a copy");
        let theirs = Theirs::of(&path);
        let case = format!("seed {seed}: {name} with {what:?}: {}", theirs.log);
        let Ok(report) = check_bytes(&bytes[..]) else {
            assert_eq!(theirs.code, 1, "{case}");
            continue;
        };
        let code = i32::from(report.verdict().exit_code());
        if report.own_findings > 0 {
            // QEMU does not look for that, or does not open the image.
            assert!(code == 2 || code == 1 && theirs.code == 1, "{case}\n{report:?}");
            let bitmaps = report.messages.iter().any(|text| text.contains("bitmap"));
            let less = theirs.code != 1 && report.corruptions < theirs.number("corruptions");
            assert!(bitmaps || !less, "{case}\n{report:?}");
            continue;
        }
        assert_eq!(code, theirs.code, "{case}\n{report:?}");
        // QEMU stops at some errors and then has no numbers.
        if theirs.code != 1 {
            for (key, ours) in numbers(&report) {
                assert_eq!(ours, theirs.number(key), "{key}, {case}\n{report:?}");
            }
        }
    }
}
