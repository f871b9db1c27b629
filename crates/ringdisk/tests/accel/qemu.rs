//! Disks in the host kernel with QEMU's own front end (libblkio): the tools write, compare, read
//! back and measure, and the kernel's counters say who has served them.

use ringdisk_testkit::images;
use ringdisk_testkit::mount::text;
use serde_json::Value;

use crate::common::accel::{
    REQUIRED, accel, answered, assert_by_kernel, becomes, by_threads, counted, has_module,
};
use crate::common::disks::disk;
use crate::common::peer::{ODD_REQUESTS, named, peer, qemu_io, runs};
use crate::common::serving::{Place, SIZE, ctl};

/// Tools that were found.
struct Tools {
    img: Vec<String>,
    io: Vec<String>,
}

fn tools() -> Option<Tools> {
    if !has_module() {
        return None;
    }
    Some(Tools { img: peer("qemu-img")?, io: peer("qemu-io")? })
}

/// All tools on one disk. Gives what is shown of the kernel at the end.
fn real_clients(tools: &Tools, place: &Place) -> Value {
    let Tools { img, io } = tools;
    let source = place.path("source");
    images::raw(&source, SIZE, 1);
    let daemon = place.start(&REQUIRED);
    let disk = named(place);
    let source = text(&source);
    let file = format!("driver=file,filename={source}");
    runs(img, &["convert", "-n", "-f", "raw", "--target-image-opts", source, &disk]);
    assert_eq!(counted(&accel(place), "write-bytes"), SIZE);
    runs(img, &["compare", "--image-opts", &disk, &file]);
    let back = place.path("back");
    runs(img, &["convert", "--image-opts", &disk, "-O", "raw", text(&back)]);
    let size = usize::try_from(SIZE).expect("small");
    assert!(images::piece(&back, 0, size) == images::pattern(1, 0, size), "read back");
    assert!(counted(&accel(place), "read-bytes") >= 2 * SIZE);

    qemu_io(io, &disk, &ODD_REQUESTS);
    let words = ["bench", "-c", "4000", "-d", "32", "-s", "4096", "-t", "none"];
    runs(img, &[&words[..], &["--image-opts", &disk]].concat());
    let words = ["bench", "-w", "-c", "1000", "-d", "16", "-s", "512", "-S", "512", "-o", "5M"];
    runs(img, &[&words[..], &["-t", "none", "--pattern", "68", "--image-opts", &disk]].concat());

    let shown = assert_by_kernel(place, 5000);
    assert!(counted(&shown, "reads") >= 4000 && counted(&shown, "writes") >= 1000, "{shown}");
    assert!(counted(&shown, "flushes") >= 1 && counted(&shown, "write-zeroes") >= 2, "{shown}");
    assert!(counted(&shown, "discards") >= 1, "{shown}");
    assert_eq!((counted(&shown, "errors"), counted(&shown, "broken")), (0, 0), "{shown}");
    daemon.stop(&[&place.socket]);
    // What is on the disk itself.
    for (byte, at) in [(0x11, 512), (0x22, 3 << 20), (0x33, 4 << 20), (68, 5 << 20)] {
        assert_eq!(images::piece(&place.image, at, 1024), [byte; 1024], "at {at}");
    }
    let (at, bytes) = (6 << 20, 1 << 20);
    assert!(images::piece(&place.image, at, bytes) == images::pattern(1, at, bytes));
    shown
}

#[test]
fn qemu_uses_a_file_in_the_kernel() {
    let Some(tools) = tools() else { return };
    let shown = real_clients(&tools, &Place::new("raw"));
    assert!(counted(&shown, "kiocbs") >= 5000 && counted(&shown, "bios") == 0, "{shown}");
}

#[test]
fn qemu_uses_a_block_device_in_the_kernel() {
    let (Some(tools), Some(disk)) = (tools(), disk("memory")) else { return };
    let shown = real_clients(&tools, &disk.place);
    assert!(counted(&shown, "bios") >= 5000, "{shown}");
}

#[test]
fn qemu_goes_on_while_its_disk_leaves_the_kernel_and_returns() {
    let Some(Tools { img, .. }) = tools() else { return };
    let place = Place::new("raw");
    let daemon = place.start(&REQUIRED);
    let disk = named(&place);
    let words = ["bench", "-w", "-c", "30000", "-d", "16", "-s", "4096", "-t", "none"];
    let words = [&words[..], &["--pattern", "90", "--image-opts", &disk]].concat();
    let trips = std::thread::scope(|scope| {
        let bench = scope.spawn(|| runs(&img, &words));
        becomes(&place, true);
        let mut trips = 0;
        while trips < 10 && !bench.is_finished() {
            for word in ["off", "on"] {
                ctl(&place.socket, &["accel", word]).ok();
            }
            trips += 1;
        }
        bench.join().expect("no request failed");
        trips
    });
    assert!(trips > 0);
    let counters = crate::common::serving::stats(&place.socket);
    let (all, there) = (counters["total"]["writes"].as_u64(), answered(&counters["accel"]));
    assert_eq!(all, Some(30_000), "{counters}");
    let here = by_threads(&counters);
    println!("{trips} round trips: {here} requests here, {there} writes in the kernel");
    assert!(here > 0 && there > 0, "{counters}");
    daemon.stop(&[&place.socket]);
    // It goes round before the last block.
    let written = images::piece(&place.image, 0, usize::try_from(SIZE).expect("small") - 4096);
    assert!(written.iter().all(|byte| *byte == 90));
}
