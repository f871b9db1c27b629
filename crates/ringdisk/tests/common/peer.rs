//! QEMU's own front end: `qemu-img` and `qemu-io` over libblkio. The machine's QEMU may be without
//! it, so this is that of `bench/peer`; where that is not installed tests say so and are left out
//! (`./test` installs it).

use std::path::Path;
use std::process::Command;

use ringdisk_testkit::limits::needs;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::ok;

use super::serving::Place;

/// A program of the peer: its first words.
pub(crate) fn peer(program: &str) -> Option<Vec<String>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/peer");
    let output = Command::new(script).args(["argv", program]).output().expect("bash");
    if output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        return Some(text.lines().map(str::to_owned).collect());
    }
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    eprintln!("{why}");
    let _ = needs("QEMU with libblkio (bench/peer install)", false);
    None
}

/// Runs `PROGRAM WORDS…` of the peer, which must succeed.
pub(crate) fn runs(program: &[String], words: &[&str]) -> String {
    ok(Command::new(&program[0]).args(&program[1..]).args(words))
}

/// The disk, as QEMU names it.
pub(crate) fn named(place: &Place) -> String {
    format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", text(&place.socket))
}
