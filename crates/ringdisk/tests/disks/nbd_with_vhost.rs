//! `--nbd` beside `--vhost-user-blk`: NBD clients of a disk that a guest uses, and how each of the
//! two ends.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringdisk_testkit::model::{Request, Vm};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, run, until};
use serde_json::Value;

use crate::common::nbd_client::NbdClient;
use crate::common::serving::{Daemon, Place, ctl, load, meanwhile, serve_command, stats};
use crate::common::tools::{child_of, ringdisk};
use crate::keep::kill;

/// A disk with a socket for a guest, and one for NBD clients.
struct Both {
    place: Place,
    nbd: PathBuf,
    daemon: Daemon,
}

impl Both {
    fn start(format: &'static str, words: &[&str]) -> Both {
        let place = Place::new(format);
        let nbd = place.path("nbd.sock");
        let daemon = place.start(&[&["--nbd", text(&nbd)], words].concat());
        Both { place, nbd, daemon }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.nbd))
    }

    fn vm(&self) -> Vm {
        self.place.vm(false)
    }

    /// All bytes, as NBD clients see them.
    fn bytes(&self) -> Vec<u8> {
        copy(&self.uri())
    }

    fn stop(self) {
        self.daemon.stop(&[&self.place.socket, &self.nbd]);
    }
}

fn copy(uri: &str) -> Vec<u8> {
    let directory = scratch();
    let copy = directory.path().join("copy");
    ok_words(&["nbdcopy", uri, text(&copy)]);
    std::fs::read(copy).expect("the copy")
}

fn qemu_io(uri: &str, io: &str) {
    ok_words(&["qemu-io", "-f", "raw", "-c", io, uri]);
}

/// The same of an export that is read-only.
fn qemu_io_read(uri: &str, io: &str) {
    ok_words(&["qemu-io", "-r", "-f", "raw", "-c", io, uri]);
}

/// Asks for so many reads of 256 KiB, and takes no reply.
fn ask_and_stall(stream: &mut UnixStream, count: u64) {
    stream.set_write_timeout(Some(Duration::from_millis(200))).expect("a limit");
    for cookie in 0..count {
        let request = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &[0; 4],
            &cookie.to_be_bytes(),
            &0_u64.to_be_bytes(),
            &(256_u32 << 10).to_be_bytes(),
        ];
        if stream.write_all(&request.concat()).is_err() {
            return;
        }
    }
}

#[test]
fn nbd_clients_read_what_a_guest_writes_and_are_listed_with_it() {
    for format in ["raw", "qcow2"] {
        let both = Both::start(format, &["--sandbox", "on"]);
        let (mut vm, mut load) = (both.vm(), load(11));
        load.run(&mut vm, 300);
        load.drain(&mut vm);
        load.judge(&both.bytes());
        // Both at once, and a resize in the middle.
        meanwhile(&mut vm, &mut load, || {
            both.bytes();
            ctl(&both.place.socket, &["limit", "iops=100000"]).ok();
            both.bytes();
            ctl(&both.place.socket, &["limit", "none"]).ok();
        });
        load.judge(&both.bytes());
        let info = ok_words(&["nbdinfo", "--json", &both.uri()]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["exports"][0]["is_read_only"], true, "{format}");
        assert!(
            !command(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &both.uri()])
                .output()
                .expect("it starts")
                .status
                .success()
        );
        let client = NbdClient::connect(&both.nbd, "").stream;
        let pid = std::process::id();
        let clients = || {
            let described = stats(&both.place.socket);
            let clients = described["serving"]["clients"].as_array().cloned().unwrap_or_default();
            let ours = clients.iter().filter(|client| client["pid"] == pid).count();
            (ours == 2).then_some(described)
        };
        // The guest and the NBD client are this process.
        let described = until(LIMIT, clients).expect("both are listed");
        let also = described["serving"]["also"].as_str().unwrap_or_default();
        assert!(also.contains(text(&both.nbd)), "{described}");
        let list = ringdisk(Path::new("/"), &["ps"]).ok().out;
        assert!(list.contains(text(&both.nbd)), "{list}");
        drop((client, vm));
        let place = both.place;
        both.daemon.stop(&[&place.socket, &both.nbd]);
        place.judge(&mut load);
    }
}

#[test]
fn nbd_clients_write_beside_a_guest_where_that_was_asked_for() {
    let both = Both::start("qcow2", &["--share-rw"]);
    let mut vm = both.vm();
    qemu_io(&both.uri(), "write -P 7 1M 64k");
    let done = vm.run(0, Request::read((1 << 20) / 512, 4096));
    assert_eq!((done.status, &done.data[..2]), (0, &[7, 7][..]));
    assert_eq!(vm.status(1, Request::write((2 << 20) / 512, vec![9; 4096])), 0);
    qemu_io(&both.uri(), "read -P 9 2M 4k");
    both.stop();
}

#[test]
fn a_checkpoint_of_both_shows_the_instant() {
    let both = Both::start("qcow2", &["--share-rw"]);
    let mut vm = both.vm();
    assert_eq!(vm.status(0, Request::write(0, vec![1; 65536])), 0);
    qemu_io(&both.uri(), "write -P 2 1M 64k");
    let before = both.bytes();
    let begun = ctl(&both.place.socket, &["checkpoint", "c1", "--bitmap", "b1", "--json"]).ok();
    let uri = begun.json()["disks"][0]["uri"].as_str().expect("a URI").to_owned();
    assert_eq!(vm.status(0, Request::write(0, vec![3; 65536])), 0);
    qemu_io(&both.uri(), "write -P 4 1M 64k");
    assert!(copy(&uri) == before, "the state of the instant");
    let after = both.bytes();
    assert_eq!((after[0], after[1 << 20]), (3, 4));
    // The server ends in the middle of it.
    drop(vm);
    both.stop();
}

#[test]
fn a_stop_waits_neither_for_clients_that_stall_nor_for_limits() {
    for words in [&[][..], &["--limit", "bps=4"]] {
        let both = Both::start("qcow2", words);
        let mut vm = both.vm();
        // One says nothing, one takes no replies.
        let silent = UnixStream::connect(&both.nbd).expect("connect");
        let mut stalls = NbdClient::connect(&both.nbd, "").stream;
        ask_and_stall(&mut stalls, 200);
        let _ = vm.submit(0, Request::read(0, 4096));
        let begun = Instant::now();
        ctl(&both.place.socket, &["stop"]).ok();
        both.daemon.ends(0);
        assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
        assert!(!both.nbd.exists() && !both.place.socket.exists());
        drop((silent, stalls, vm));
    }
}

#[test]
fn a_guest_keeps_a_disk_that_ends_when_it_is_idle() {
    let both = Both::start("raw", &["--idle-exit", "500ms"]);
    let mut vm = both.vm();
    qemu_io_read(&both.uri(), "read 0 4k");
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    drop(vm);
    let socket = both.place.socket.clone();
    both.daemon.ends(0);
    assert!(!socket.exists() && !both.nbd.exists());
}

#[test]
fn one_disk_of_two_ends_alone() {
    let (a, b) = (Place::new("qcow2"), Place::new("raw"));
    let nbd = a.path("nbd.sock");
    let disk = |place: &Place, name: &str| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        format!("image={image},format={},socket={socket},export-name={name}", place.format)
    };
    let (first, second) = (disk(&a, "a"), disk(&b, "b"));
    let words = ["--queues", "2", "--disk", &first, "--disk", &second, "--nbd", text(&nbd)];
    let daemon = Daemon::of(&mut serve_command(&words));
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", text(&nbd));
    let mut vm = b.vm(false);
    // A client of the disk that ends, and one of the other.
    let reads = |name: &str| {
        let script = format!(
            "import time\nh.connect_uri('{}')\nh.pread(4096, 0)\nprint('ready', flush=True)\n\
             while True:\n  h.pread(4096, 0)\n  time.sleep(0.01)",
            uri(name)
        );
        let mut python = command(&["/usr/bin/python3", "-m", "nbd", "-c", &script]);
        let client = Process::spawn(&mut python);
        until(LIMIT, || client.output().contains("ready").then_some(())).expect("it reads");
        client
    };
    let (mut of_a, mut of_b) = (reads("a"), reads("b"));
    ctl(&a.socket, &["stop"]).ok();
    until(LIMIT, || of_a.ended().map(|_| ())).expect("its connection ends");
    let image = text(&a.image);
    ok_words(&["qemu-io", "-f", "qcow2", "-c", "write 0 64k", image]);
    let list = ok_words(&["nbdinfo", "--list", "--json", &uri("b")]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let names: Vec<_> = list["exports"].as_array().expect("a list").iter().collect();
    assert_eq!((names.len(), &names[0]["export-name"]), (1, &Value::from("b")), "{list}");
    assert!(of_b.ended().is_none());
    assert_eq!(vm.status(0, Request::write(0, vec![5; 4096])), 0);
    qemu_io_read(&uri("b"), "read -P 5 0 4k");
    drop(vm);
    ctl(&b.socket, &["stop"]).ok();
    daemon.ends(0);
    assert!(!nbd.exists());
}

#[test]
fn what_cannot_be_served_to_both_is_refused_in_words() {
    let place = Place::new("raw");
    let image = text(&place.image);
    let both = ["--vhost-user-blk", "/tmp/x/s", "--nbd", "/tmp/x/n"];
    let disks = [
        &format!("--disk=image={image},socket=/tmp/x/s,export-name=a")[..],
        &format!("--disk=image={image},export-name=b"),
    ];
    for (words, code, text) in [
        (&[&[image][..], &both, &["--accel", "require"]].concat()[..], 2, "contradict"),
        (&[&[image][..], &both, &["--incoming"]].concat(), 2, "cannot be used with"),
        (&[&disks[..], &["--nbd", "/tmp/x/n"]].concat(), 2, "or none has one"),
    ] {
        ringdisk(Path::new("/"), &[&["serve"], words].concat()).ends(code).says(text);
    }
    let both = Both::start("raw", &[]);
    ctl(&both.place.socket, &["accel", "on"]).ends(2).says("over NBD, too");
    both.stop();
}

/// The guest notices nothing of a kill; NBD clients connect again, at the same addresses.
#[test]
fn a_kept_disk_has_nbd_clients_after_a_kill_too() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let port = free_port();
        let tcp = format!("127.0.0.1:{port}");
        let nbd = place.path("nbd.sock");
        let words = ["--nbd", text(&nbd), "--nbd", &tcp, "--keep"];
        let both = Both { daemon: place.start(&words), place, nbd };
        let (mut vm, mut load) = (both.vm(), load(17));
        load.run(&mut vm, 60);
        for _ in 0..2 {
            let helper = both.daemon.process.pid();
            let server = until(LIMIT, || child_of(helper)).expect("a server");
            let _client = NbdClient::connect(&both.nbd, "").stream;
            kill(server);
            load.run(&mut vm, 40);
            load.drain(&mut vm);
            let again = |uri: &str| {
                let info = || run(command(&["nbdinfo", "--size", uri])).code() == Some(0);
                let served = until(LIMIT, || info().then_some(()));
                assert!(served.is_some(), "{}", both.daemon.process.output());
            };
            again(&both.uri());
            again(&format!("nbd://{tcp}"));
            load.judge(&both.bytes());
            let shown = stats(&both.place.socket);
            assert!(shown["serving"].to_string().contains("nbd.sock"), "{shown}");
        }
        drop(vm);
        both.stop();
    }
}

/// A port that no process listens on at this moment.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
