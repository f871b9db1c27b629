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

/// Requests of odd size, flushes, zeroes, discards, several at once.
pub(crate) const ODD_REQUESTS: [&str; 13] = [
    "write -P 0x11 512 1536",
    "write -z 64k 128k",
    "write -z -u 1M 256k",
    "discard 2M 512k",
    "flush",
    "read -P 0x11 512 1536",
    "read -P 0 64k 128k",
    "read -P 0 1M 256k",
    "aio_write -P 0x22 3M 1M",
    "aio_write -P 0x33 4M 1M",
    "aio_flush",
    "read -P 0x22 3M 1M",
    "read -P 0x33 4M 1M",
];

/// Commands of qemu-io, which all succeed.
pub(crate) fn qemu_io(io: &[String], disk: &str, commands: &[&str]) {
    let mut words = vec!["--image-opts"];
    commands.iter().for_each(|command| words.extend(["-c", command]));
    words.push(disk);
    let out = runs(io, &words);
    assert!(!out.contains("failed") && !out.contains("rror"), "{out}");
}
