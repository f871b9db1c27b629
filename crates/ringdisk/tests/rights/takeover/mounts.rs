//! What a process of a mount that was taken over hands to its successor (`mount --upgrade`).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::Process;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{MIB, open};
use crate::takeover::agent::Agent;
use crate::takeover::mounted::{Taken, ready};
use crate::takeover::out_of_reach::{Others, identity, number};
use crate::takeover::successor::{
    Handed, SUCCESSOR_LIMIT, asked, handed_of, listener, read_only, send,
};

/// A mount whose process was taken over.
struct Hostile {
    directory: TempDir,
    image: PathBuf,
    mounted: Taken,
    listener: UnixListener,
    /// Where the process waits for its successor.
    path: PathBuf,
}

impl Hostile {
    fn new() -> Hostile {
        let directory = scratch();
        let image = directory.path().join("disk.img");
        images::raw(&image, 8 * MIB, 1);
        let mounted = Taken::start(&["--format", "raw", text(&image)]);
        mounted.ctl(&["stats"]);
        let agent = Agent::over(mounted.process.pid());
        let (listener, path) = listener(&agent, mounted.socket());
        agent.goes_on();
        Hostile { directory, image, mounted, listener, path }
    }

    /// What it would hand over, and the process, which runs no more.
    fn handed(&self) -> (Handed, Agent) {
        let pid = i32::try_from(self.mounted.process.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a pid"), Signal::CONT).expect("it lives");
        let handed = handed_of(&self.path);
        (handed, Agent::over(self.mounted.process.pid()))
    }

    fn successor(&self, handed: &Handed) -> (Process, UnixStream) {
        let process = Process::spawn(&mut self.mounted.successor(&[]));
        let stream = asked(&self.listener);
        send(&stream, handed.words.to_string().as_bytes(), &handed.fds);
        (process, stream)
    }

    /// A successor gets this, and refuses it. The process that was taken over goes on.
    #[track_caller]
    fn refuses(&self, what: &str, text: &str, change: impl FnOnce(&mut Handed)) {
        let (mut handed, agent) = self.handed();
        change(&mut handed);
        let (process, stream) = self.successor(&handed);
        let said = (&stream).read(&mut [0]).unwrap_or(0);
        assert_eq!(said, 0, "{what} is taken: {}", process.output());
        let finished = process.finish(SUCCESSOR_LIMIT);
        let output = finished.output();
        assert!(finished.code().is_some_and(|code| code != 0), "{what}: {output}");
        assert!(!output.contains("panicked"), "{what}: {output}");
        assert!(finished.stderr.contains(text), "{what}: {output}");
        agent.goes_on();
    }

    fn end(self) {
        open(self.mounted.path()).write_all_at(b"it goes on", 0).expect("a write");
        drop(self.mounted.stop());
    }
}

/// Descriptors of a mount of a process.
fn devices(pid: u32) -> Vec<OwnedFd> {
    let agent = Agent::over(pid);
    let devices = agent.all(|name| name == "/dev/fuse");
    agent.goes_on();
    devices
}

#[test]
fn another_mount_is_not_taken() {
    if !needs_root() {
        return;
    }
    let hostile = Hostile::new();
    let others = Others::new();
    let second = Taken::start(&["--null", "1M"]);
    let mut foreign = devices(second.process.pid());
    let nobodys: OwnedFd =
        File::options().read(true).write(true).open("/dev/fuse").expect("root").into();
    let file = read_only(&hostile.image);
    for (what, why, device) in [
        ("a descriptor of another mount", "one of another mount", foreign.pop().expect("one")),
        ("one of no mount", "does not say which mount", nobodys),
        ("a file", "none of /dev/fuse", file),
    ] {
        hostile.refuses(what, why, |handed| {
            let place = handed.place("Device");
            handed.fds[place] = device;
        });
    }
    // With all that belongs to it.
    let connection = number(second.path());
    let mountpoint = text(second.path()).to_owned();
    hostile.refuses("another mountpoint", "another mount", |handed| {
        handed.words["mount"]["mountpoint"] = json!(mountpoint);
    });
    hostile.refuses("another number", "another mount", |handed| {
        handed.words["mount"]["connection"] = json!(connection);
        let place = handed.place("Device");
        handed.fds[place] = devices(second.process.pid()).pop().expect("one");
    });
    hostile.refuses("no descriptor", "no descriptor of the mount", |handed| {
        let place = handed.place("Device");
        handed.fds.remove(place);
        handed.words["roles"].as_array_mut().expect("roles").remove(place);
    });
    others.assert_same();
    drop(second.stop());
    hostile.end();
}

#[test]
fn another_image_is_not_served() {
    if !needs_root() {
        return;
    }
    let hostile = Hostile::new();
    let others = Others::new();
    let secret = others.path("secret");
    hostile.refuses("a secret", "--allow-path", |handed| {
        handed.with_image(read_only(&secret), identity(&secret), true);
    });
    let neighbour = hostile.directory.path().join("neighbour");
    images::raw(&neighbour, 8 * MIB, 2);
    hostile.refuses("a neighbour", "--allow-path", |handed| {
        handed.with_image(open(&neighbour).into(), identity(&neighbour), false);
    });
    hostile.refuses("an image to read", "ringdisk: error", |handed| {
        handed.with_image(read_only(&hostile.image), identity(&hostile.image), false);
    });
    others.assert_same();
    hostile.end();
}

#[test]
fn words_that_make_no_sense_are_refused() {
    if !needs_root() {
        return;
    }
    let hostile = Hostile::new();
    for (at, value, why) in [
        ("/version", json!(2), "its version is 2"),
        ("/mount/max_pages", json!(65535), "sizes that this machine does not have"),
        ("/mount/page_bytes", json!(u32::MAX), "sizes that this machine does not have"),
        ("/mount", json!(7), "cannot be read"),
        ("/mount", json!({}), "the state of another mount"),
        ("/roles", json!([]), "it names 0"),
        ("/disk", json!("{}"), "ringdisk: error"),
    ] {
        hostile.refuses(at, why, |handed| {
            *handed.words.pointer_mut(at).expect("a field") = value;
        });
    }
    hostile.end();
}

/// The successor takes what is right in it, and believes nothing that would cost the user a file.
#[test]
fn a_file_of_the_user_below_the_mount_stays() {
    if !needs_root() {
        return;
    }
    let hostile = Hostile::new();
    let (mut handed, agent) = hostile.handed();
    // The file that the mount hides is shown once more, and filled, as if it had never been empty.
    let lock = handed.place("Lock");
    let below = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&handed.fds[lock]));
    fs::write(Path::new(&below), "the user's").expect("root may");
    let id = identity(Path::new(&below));
    handed.words["mount"]["made"] = json!([id.0, id.1]);
    handed.words["file"]["since_s"] = json!(u64::MAX);
    handed.words["file"]["open_files"] = json!(0);
    handed.words["file"]["mode"] = json!(0o600);
    let (process, mut stream) = hostile.successor(&handed);
    drop(handed);
    let mut word = [0];
    stream.read_exact(&mut word).expect("it is ready");
    stream.write_all(b"G").expect("it goes");
    drop(stream);
    agent.dies();
    let process = ready(process);
    let path = hostile.mounted.path().to_owned();
    open(&path).write_all_at(b"served", 0).expect("a write");
    process.signal(Signal::TERM);
    let finished = process.finish(SUCCESSOR_LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(fs::read(&path).expect("it stays"), b"the user's");
}
