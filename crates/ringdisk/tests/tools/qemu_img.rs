//! This program under the name `qemu-img`, beside the one of QEMU 11.1: the same output, the same
//! errors, the same exit codes.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_testkit::images::{self, qemu_io};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::run;

use crate::common::peer::peer;
use crate::common::program;
use crate::common::tools::qemu_img;

/// Exit code, standard output, standard error.
type Said = (i32, String, String);

fn said(mut command: Command, d: &Path, words: &[&str]) -> Said {
    command.args(words).current_dir(d).stdin(Stdio::null()).env("TZ", "America/New_York");
    let finished = run(&mut command);
    (finished.status.code().unwrap_or(-1), finished.stdout, finished.stderr)
}

fn ours(d: &Path, words: &[&str]) -> Said {
    let mut command = Command::new(program());
    command.arg0("qemu-img");
    said(command, d, words)
}

fn images(d: &Path) {
    images::qcow2(&d.join("a.qcow2"), "4M", "");
    qemu_io(&d.join("a.qcow2"), "qcow2", &["write -P 1 0 1M"]);
    qemu_img(d, &["snapshot", "-c", "then", "a.qcow2"]).ok();
    images::raw(&d.join("r.img"), 1 << 20, 7);
}

/// Commands after which both have said the same.
const COMMANDS: &[&[&str]] = &[
    &["snapshot", "-l", "a.qcow2"],
    &["info", "gone"],
    &["info", "--image-opts", "a.qcow2"],
    &["info", "--image-opts", "-f", "raw", "driver=raw"],
    &["info", "-f", "qcow2", "r.img"],
    &["info", "/usr"],
    &["map", "gone"],
    &["check", "gone"],
    &["check", "r.img"],
    &["check", "a.qcow2"],
    &["compare", "gone", "r.img"],
    &["compare", "r.img", "a.qcow2"],
    &["convert", "-l", "gone", "a.qcow2", "x"],
    &["convert", "-l", "then", "r.img", "x"],
    &["convert", "-l", "then", "a.qcow2", "a.qcow2", "x"],
    &["convert", "-b", "b", "-F", "raw", "-O", "qcow2", "r.img", "r.img", "x"],
    &["convert", "--bitmaps", "-O", "qcow2", "a.qcow2", "a.qcow2", "x"],
    &["convert", "-C", "-S", "4k", "r.img", "x"],
    &["convert", "-C", "-c", "-O", "qcow2", "r.img", "x"],
    &["convert", "--target-image-opts", "r.img", "driver=raw,file.filename=x"],
    &["convert", "-O", "raw", "r.img", "gone/x"],
    &["convert", "r.img", "gone/x.qcow2"],
    &["measure", "-l", "gone", "a.qcow2"],
    &["create", "-f", "qcow2", "gone/x", "1M"],
    &["create", "-f", "qcow2", "-b", "gone", "-F", "raw", "x", "1M"],
    &["create", "-f", "qcow2", "-o", "foo=1", "x", "1M"],
    &["create", "-f", "qcow2", "x"],
    &["create", "n.qcow2", "0x100000"],
    &["create", "-f", "raw", "-o", "extent_size_hint=2M", "h", "1M"],
    &["create", "-f", "qcow2", "-o", "extent_size_hint=2M", "h", "1M"],
    &["create", "-f", "qcow2", "file:f.qcow2", "1.5M"],
    &["commit", "-f", "raw", "r.img"],
    &["snapshot", "-a", "gone", "a.qcow2"],
    &["snapshot", "-d", "gone", "a.qcow2"],
    &["snapshot", "-f", "raw", "-c", "s", "r.img"],
    &["resize", "-f", "raw", "r.img", "512K"],
    &["resize", "-f", "raw", "--shrink", "r.img", "-2M"],
    &["resize", "a.qcow2", "0x800000"],
    &["rebase", "-b", "gone", "-F", "raw", "a.qcow2"],
    &["rebase", "-u", "-b", "gone", "-F", "raw", "a.qcow2"],
];

#[test]
fn both_say_the_same() {
    let Some(theirs) = peer("qemu-img") else { return };
    let (one, other) = (scratch(), scratch());
    images(one.path());
    // The same bytes, dates included.
    for name in ["a.qcow2", "r.img"] {
        std::fs::copy(one.path().join(name), other.path().join(name)).expect("copy");
    }
    for words in COMMANDS {
        let mut command = Command::new(&theirs[0]);
        command.args(&theirs[1..]);
        let wanted = said(command, one.path(), words);
        assert_eq!(ours(other.path(), words), wanted, "{words:?}");
    }
}

#[test]
fn a_locked_image_is_refused_in_the_words_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    let hold = || {
        let mut holder = Command::new("qemu-io");
        holder.args(["-f", "qcow2", "-c", "sleep 600000", "a.qcow2"]).current_dir(d);
        holder.stdout(Stdio::null()).spawn().expect("qemu-io starts")
    };
    let mut holder = hold();
    let waited = ringdisk_testkit::process::until(std::time::Duration::from_secs(20), || {
        // Our own look locks the image for a moment; a qemu-io that came then has given up.
        if holder.try_wait().expect("a child").is_some() {
            holder = hold();
        }
        (ours(d, &["info", "a.qcow2"]).0 == 1).then_some(())
    });
    assert!(waited.is_some(), "qemu-io does not lock");
    for (words, kind) in [
        (&["info", "a.qcow2"][..], "shared \"write\""),
        (&["convert", "a.qcow2", "x"], "shared \"write\""),
        (&["resize", "a.qcow2", "8M"], "\"write\""),
        (&["bitmap", "--add", "a.qcow2", "b"], "\"write\""),
    ] {
        let wanted = format!(
            "qemu-img: Could not open 'a.qcow2': Failed to get {kind} lock\n\
             Is another process using the image [a.qcow2]?\n"
        );
        assert_eq!(ours(d, words), (1, String::new(), wanted), "{words:?}");
    }
    holder.kill().expect("kill");
    holder.wait().expect("wait");
}

#[test]
fn words_that_it_does_not_know_are_refused_in_its_words() {
    let directory = scratch();
    let d = directory.path();
    for (words, text) in [
        (&[][..], "qemu-img: Not enough arguments\nTry 'qemu-img --help'"),
        (&["nope"], "qemu-img: Command not found: nope\nTry 'qemu-img --help'"),
        (&["mount", "a", "b"], "qemu-img: Command not found: mount\n"),
        (&["info", "--nope", "x"], "qemu-img: unexpected argument '--nope'"),
    ] {
        let (code, _, err) = ours(d, words);
        assert_eq!(code, 1, "{words:?}");
        assert!(err.starts_with(text), "{words:?}: {err}");
    }
    let (code, out, _) = ours(d, &["--version"]);
    assert!(code == 0 && out.starts_with("qemu-img version 11.1.3 (ringdisk "), "{out}");
    let (code, out, _) = ours(d, &["--help"]);
    assert!(code == 0 && out.contains("Supported formats: qcow2 raw"), "{out}");
    // Under its own name nothing of this is said.
    let own = said(Command::new(program()), d, &["info", "gone"]);
    assert!(own.0 == 3 && own.2.starts_with("ringdisk: error: cannot open the image 'gone'"));
}
