//! Images that were not closed cleanly, opened for writing.

use std::process::Command;
use std::sync::Arc;

use ringdisk_qcow2::{OpenOptions, Qcow2, check_bytes};
use ringdisk_ring::Runtime;
use ringdisk_storage::Storage;
use ringdisk_testkit::sim::SimStorage;

use crate::check::Theirs;
use crate::common::{Images, MIB, runtime};

/// An image with lazy refcounts that QEMU was killed with.
fn killed(images: &Images, name: &str, options: &str) -> Vec<u8> {
    let path = images.create(name, &format!("{options},lazy_refcounts=on"), 8 * MIB);
    let writes = ["write -q -P 1 0 300k", "write -q -P 2 3M 1M", "write -q -z 100k 64k"];
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]);
    for write in writes {
        command.args(["-c", write, "-c", "flush"]);
    }
    let killed = command.args(["-c", "sigraise 9"]).arg(&path).output().expect("qemu-io");
    assert!(!killed.status.success(), "it was to be killed");
    std::fs::read(&path).expect("the image")
}

fn open(runtime: &mut Runtime, storage: &Arc<Storage>) -> Result<(), ringdisk_qcow2::Error> {
    let ring = runtime.ring().clone();
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    runtime.block_on(async {
        let image = Qcow2::open(&ring, storage.clone(), &options).await?;
        image.close(&ring).await.expect("nothing was written");
        Ok(())
    })
}

#[test]
fn refcounts_of_an_image_that_was_not_closed_are_rebuilt_at_a_writable_open() {
    let images = Images::new();
    let mut runtime = runtime();
    for options in ["compat=1.1", "cluster_size=512", "cluster_size=4k,refcount_bits=1"] {
        let bytes = killed(&images, "lazy", options);
        let before = check_bytes(&bytes[..]).expect("a good image");
        assert!(before.dirty && before.corruptions > 0, "{options}: {before:?}");
        let expected = images.converted("lazy");
        let sim = SimStorage::from_image(&bytes, 1);
        open(&mut runtime, &sim.storage()).expect("the refcounts can be rebuilt");
        let after = check_bytes(&sim.image()[..]).expect("a good image");
        assert!(after.is_clean() && !after.dirty, "{options}: {after:?}");
        std::fs::write(images.path("lazy"), sim.image()).expect("a copy");
        assert_eq!(Theirs::of(&images.path("lazy")).code, 0, "{options}");
        assert!(images.converted("lazy") == expected, "{options}: the contents changed");
    }
}

#[test]
fn counts_past_the_end_of_an_image_that_was_not_closed_do_not_become_leaks() {
    let images = Images::new();
    let mut runtime = runtime();
    let bytes = killed(&images, "lazy", "compat=1.1");
    let sim = SimStorage::from_image(&bytes, 1);
    open(&mut runtime, &sim.storage()).expect("the refcounts can be rebuilt");
    // The file did not grow before the crash, the counts did.
    let content = sim.image();
    let word = |at: usize| u64::from_be_bytes(content[at..at + 8].try_into().expect("8 bytes"));
    let block = word(usize::try_from(word(48)).expect("small"));
    let behind = content.len().div_ceil(1 << 16) as u64;
    sim.put(block + behind * 2, &[0, 1, 0, 1]);
    sim.put(79, &[1]);
    open(&mut runtime, &sim.storage()).expect("the refcounts can be rebuilt");
    let mut grown = sim.image();
    assert_eq!(grown[79], 0, "the dirty bit");
    grown.resize(content.len() + (4 << 16), 0);
    let after = check_bytes(&grown[..]).expect("a good image");
    assert!(after.is_clean(), "{after:?}");
}

#[test]
fn an_image_that_was_not_closed_stays_as_it_is_when_it_is_only_read() {
    let images = Images::new();
    let mut runtime = runtime();
    let bytes = killed(&images, "lazy", "compat=1.1");
    let sim = SimStorage::from_image(&bytes, 1);
    let ring = runtime.ring().clone();
    let options = OpenOptions::default();
    let opened = runtime.block_on(Qcow2::open(&ring, sim.storage(), &options));
    assert!(opened.expect("a good image").info().dirty);
    assert_eq!(sim.image(), bytes);
}
