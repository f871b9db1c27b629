//! This program under the name `qemu-nbd`: as scripts start it, with real clients.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{ok_words, until};

use crate::common::serving::Place;

fn qemu_nbd(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.arg0("qemu-nbd").args(words);
    command
}

/// For what a process does when another one asked for it.
const SOON: Duration = Duration::from_secs(20);

fn output(words: &[&str]) -> Output {
    qemu_nbd(words).output().expect("it can be started")
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", text(socket))
}

/// What scripts look for on the standard error output; the exit code is 1.
fn error(words: &[&str]) -> String {
    let output = output(words);
    assert_eq!(output.status.code(), Some(1), "{words:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn in_the_background_it_serves_until_it_is_stopped() {
    let place = Place::new("qcow2");
    let pid_file = place.directory.path().join("pid");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let words = ["-t", "-e 4", "--fork", "-f", "qcow2", "-k", socket, "--pid-file"];
    let started = output(&[&words[..], &[text(&pid_file), "--discard=unmap", image]].concat());
    assert!(started.status.success(), "{started:?}");
    assert!(started.stdout.is_empty() && started.stderr.is_empty(), "{started:?}");
    let uri = uri(&place.socket);
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &uri]);
    ok_words(&["qemu-io", "-f", "raw", "-c", "read -P 7 0 1M", &uri]);
    let list = output(&["-L", "-k", socket]);
    let list = String::from_utf8(list.stdout).expect("text");
    assert!(list.starts_with("exports available: 1\n export: ''\n  size:  8388608\n"), "{list}");
    assert!(list.contains("   base:allocation\n"), "{list}");
    let second = error(&["-f", "qcow2", "-k", &format!("{socket}-2"), image]);
    let wanted = format!(
        "qemu-nbd: Failed to blk_new_open '{image}': Failed to get \"write\" lock\n\
         Is another process using the image [{image}]?\n"
    );
    assert_eq!(second, wanted);
    let pid = fs::read_to_string(&pid_file).expect("a pid");
    ok_words(&["kill", pid.trim()]);
    assert!(until(SOON, || (!place.socket.exists()).then_some(())).is_some(), "the socket stays");
}

#[test]
fn the_first_client_ends_it_and_one_that_only_asks_does_not() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let mut server = qemu_nbd(&["-f", "raw", "-k", socket, image]).spawn().expect("a server");
    assert!(until(SOON, || place.socket.exists().then_some(())).is_some(), "no socket");
    assert!(output(&["--list", "-k", socket]).status.success());
    std::thread::sleep(Duration::from_millis(200));
    assert!(server.try_wait().expect("a state").is_none(), "a client that asks is none");
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &uri(&place.socket)]);
    assert_eq!(server.wait().expect("an end").code(), Some(0));
    assert!(!place.socket.exists());
    assert!(fs::read(&place.image).expect("bytes")[..1 << 20].iter().all(|byte| *byte == 7));
}

#[test]
fn what_is_wrong_has_the_texts_of_qemu_nbd() {
    let place = Place::new("qcow2");
    let (image, socket) = (text(&place.image), text(&place.socket));
    for (words, wanted) in [
        (
            &["-k", socket, "none"][..],
            "Failed to blk_new_open 'none': Could not open 'none': No such file or directory\n",
        ),
        (&["-f", "qcow2", "-B", "b", "-k", socket, image], "Bitmap 'b' is not found\n"),
        (
            &["-f", "qcow2", "-k", "/nonexistent/a", image],
            "Failed to bind socket to /nonexistent/a: No such file or directory\n",
        ),
        (&["-e", "x", image], "Invalid shared device number 'x'\n"),
        (&["-L", "-k", socket], "Failed to connect to '"),
    ] {
        let said = error(words);
        assert!(said.starts_with(&format!("qemu-nbd: {wanted}")), "{words:?}: {said}");
    }
    assert!(!place.socket.exists());
}
