//! `ringdisk serve` with QEMU's own front end: `qemu-img` and `qemu-io` over libblkio. The
//! machine's QEMU may be without it, so this is that of `bench/peer`; where that is not installed
//! the tests say so and are left out (`./test` installs it).

use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, pause, until};

use crate::common::peer::{ODD_REQUESTS, named, peer, qemu_io, runs};
use crate::common::serving::{Place, SIZE, ctl, meanwhile, stats};
use crate::common::tools::{child_of, qemu_img};

fn real_clients(format: &'static str) {
    let (Some(img), Some(io)) = (peer("qemu-img"), peer("qemu-io")) else { return };
    let place = Place::new(format);
    let source = place.path("source");
    images::raw(&source, SIZE, 1);
    let daemon = place.start(&[]);
    let disk = named(&place);
    let source = text(&source);
    // Written, compared, and read back.
    runs(&img, &["convert", "-n", "-f", "raw", "--target-image-opts", source, &disk]);

    let file = format!("driver=file,filename={source}");
    runs(&img, &["compare", "--image-opts", &disk, &file]);
    let back = place.path("back");
    runs(&img, &["convert", "--image-opts", &disk, "-O", "raw", text(&back)]);
    images::assert_same(Path::new(source), &back, "read back");
    qemu_io(&io, &disk, &ODD_REQUESTS);
    // Load of many requests at once, while the disk changes below.
    let overlay = place.path("overlay.qcow2");
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| {
            let words = ["bench", "-c", "20000", "-d", "64", "-s", "4096", "-t", "none"];
            runs(&img, &[&words[..], &["--image-opts", &disk]].concat())
        });
        ctl(&place.socket, &["snapshot", text(&overlay)]).ok();
        bench.join().expect("it ran");
    });
    let words = ["bench", "-w", "-c", "3000", "-d", "16", "-s", "512", "-S", "512", "-o", "5M"];
    runs(&img, &[&words[..], &["-t", "none", "--image-opts", &disk]].concat());
    let counters = stats(&place.socket);
    assert!(counters["total"]["reads"].as_u64() >= Some(20_000), "{counters}");
    assert_eq!(counters["total"]["errors"], 0, "{counters}");
    daemon.stop(&[&place.socket]);
    let content = images::reference(&overlay, "qcow2");
    for (seed, at) in [(0x11, 512), (0x22, 3 << 20), (0x33, 4 << 20)] {
        assert_eq!(images::piece(&content, at, 1024), [seed; 1024], "at {at}");
    }
    images::assert_clean(&overlay);
    let compared = qemu_img(place.directory.path(), &["info", "-f", "qcow2", "overlay.qcow2"]);
    compared.ok();
}

#[test]
fn qemu_uses_a_raw_disk() {
    real_clients("raw");
}

#[test]
fn qemu_uses_a_qcow2_disk() {
    real_clients("qcow2");
}

#[test]
fn qemu_goes_on_over_an_upgrade() {
    let Some(img) = peer("qemu-img") else { return };
    let place = Place::new("qcow2");
    let mut daemon = place.start(&[]);
    let disk = named(&place);
    let (out, times) = std::thread::scope(|scope| {
        let bench = scope.spawn(|| {
            let words = ["bench", "-w", "-c", "150000", "-d", "16", "-s", "4096", "-t", "none"];
            runs(&img, &[&words[..], &["--pattern", "90", "--image-opts", &disk]].concat())
        });
        let mut times = 0;
        while !bench.is_finished() && times < 3 {
            let new = place.start(&["--upgrade"]);
            let old = std::mem::replace(&mut daemon, new);
            old.ends(0);
            times += 1;
        }
        (bench.join().expect("no request failed"), times)
    });
    assert!(times > 0);
    println!("{times} upgrades: {out}");
    daemon.stop(&[&place.socket]);
    let content = images::reference(&place.image, "qcow2");
    assert_eq!(images::piece(&content, 0, 1 << 20), [90; 1 << 20]);
}

/// libblkio cannot connect again.
#[test]
fn qemu_goes_on_over_kills_of_a_kept_disk() {
    let Some(img) = peer("qemu-img") else { return };
    let place = Place::new("qcow2");
    let daemon = place.start(&["--keep"]);
    let disk = named(&place);
    let (out, kills) = std::thread::scope(|scope| {
        let bench = scope.spawn(|| {
            let words = ["bench", "-w", "-c", "150000", "-d", "16", "-s", "4096", "-t", "none"];
            runs(&img, &[&words[..], &["--pattern", "90", "--image-opts", &disk]].concat())
        });
        let mut kills = 0;
        while !bench.is_finished() && kills < 5 {
            pause(Duration::from_millis(100));
            let serving = until(LIMIT, || child_of(daemon.process.pid())).expect("one serves");
            crate::keep::kill(serving);
            kills += 1;
        }
        (bench.join().expect("no request failed"), kills)
    });
    println!("{kills} kills: {out}");
    daemon.stop(&[&place.socket]);
    let content = images::reference(&place.image, "qcow2");
    assert_eq!(images::piece(&content, 0, 1 << 20), [90; 1 << 20]);
}

#[test]
fn a_model_of_ours_and_qemu_agree() {
    let Some(img) = peer("qemu-img") else { return };
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), crate::common::serving::load(5));
    meanwhile(&mut vm, &mut load, || ());
    drop(vm);
    let back = place.path("back");
    runs(&img, &["convert", "--image-opts", &named(&place), "-O", "raw", text(&back)]);
    load.judge(&std::fs::read(back).expect("what QEMU read"));
    daemon.stop(&[&place.socket]);
}
