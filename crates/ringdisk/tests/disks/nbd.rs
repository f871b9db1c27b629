//! `ringdisk serve --nbd` with real clients: libnbd's tools, qemu-img, fio; and what is refused.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, command, ok, ok_words, run, until};
use serde_json::Value;

use crate::common::program;
use crate::common::serving::{Daemon, Place, ctl, serve_command, stats};
use crate::common::tools::{qemu_img, ringdisk};

/// `ringdisk serve IMAGE --nbd SOCKET WORDS…`
fn served(place: &Place, words: &[&str]) -> Daemon {
    let (image, socket) = (text(&place.image), text(&place.socket));
    let own = [image, "-f", place.format, "--nbd", socket];
    Daemon::of(&mut serve_command(&[&own[..], words].concat()))
}

fn uri(socket: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", text(socket))
}

fn json(words: &[&str]) -> Value {
    serde_json::from_str(&ok_words(words)).expect("JSON")
}

#[test]
fn libnbd_sees_what_is_served_and_copies_it_both_ways() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let words = ["--description", "a disk", "--export-name", "vda"];
        let daemon = served(&place, &words);
        let mode = fs::metadata(&place.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let uri = uri(&place.socket, "vda");
        let info = json(&["nbdinfo", "--json", &uri]);
        let export = &info["exports"][0];
        assert_eq!(export["export-name"], "vda");
        assert_eq!(export["description"], "a disk");
        assert_eq!(export["export-size"], 8 << 20);
        for can in ["can_cache", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn"] {
            assert_eq!(export[can], true, "{can}");
        }
        let list = json(&["nbdinfo", "--list", "--json", &uri]);
        assert_eq!(list["exports"].as_array().unwrap().len(), 1);
        let source = place.directory.path().join("source");
        let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at / 777).to_le_bytes()[0]).collect();
        fs::write(&source, &bytes).unwrap();
        let copy = place.directory.path().join("copy");
        let many = ["nbdcopy", "--connections=4", "--requests=64", "--flush"];
        ok_words(&[&many[..], &[text(&source), &uri]].concat());
        ok_words(&[&many[..], &[&uri, text(&copy)]].concat());
        assert!(fs::read(&copy).unwrap() == bytes, "{format}");
        daemon.stop(&[&place.socket]);
        let compare = ["compare", "-f", format, "-F", "raw", text(&place.image), text(&source)];
        qemu_img(Path::new("/"), &compare).ok();
    }
}

#[test]
fn a_free_port_is_found_and_said() {
    let place = Place::new("raw");
    let words = [text(&place.image), "-f", "raw", "--nbd", "localhost:0", "--nbd", "0"];
    let daemon = Daemon::of(&mut serve_command(&words));
    let output = daemon.process.output();
    let places = output.split("is served over NBD at ").nth(1).expect("two places");
    let places: Vec<&str> = places.lines().next().unwrap().split(", at ").collect();
    assert_eq!(places.len(), 2, "{output}");
    for place in &places {
        assert!(!place.ends_with(":0"), "{output}");
        assert_eq!(ok_words(&["nbdinfo", "--size", &format!("nbd://{place}")]).trim(), "8388608");
    }
    ctl(Path::new(places[0]), &["stop"]).ok();
    daemon.ends(0);
}

#[test]
fn an_address_that_is_given_twice_is_refused_by_its_name() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let words = ["serve", image, "-f", "raw", "--nbd", socket, "--nbd", socket];
    let refused = ringdisk(Path::new("/"), &words);
    refused.ends(2).says(&format!("--nbd {socket} is given twice"));
    assert!(!place.socket.exists());
}

#[test]
fn what_the_server_says_is_shown_as_it_says_it() {
    let place = Place::new("raw");
    let daemon = served(&place, &[]);
    let refused = ringdisk(Path::new("/"), &["info", &uri(&place.socket, "it's")]);
    let said = "the server has no such export: export 'it's' not present";
    refused.says(said);
    daemon.stop(&[&place.socket]);
}

#[test]
fn nbdsh_finds_structured_replies_contexts_and_errors() {
    let place = Place::new("qcow2");
    let daemon = served(&place, &[]);
    let script = "
h.add_meta_context('base:allocation')
h.add_meta_context('qemu:allocation-depth')
h.connect_unix(socket)
assert h.get_structured_replies_negotiated()
assert h.can_multi_conn() and h.can_df() and h.can_fast_zero()
h.pwrite(b'x' * 65536, 65536, nbd.CMD_FLAG_FUA)
assert h.pread(65536, 65536) == b'x' * 65536
h.zero(4096, 65536)
h.trim(4096, 69632)
h.cache(65536, 0)
h.flush()
seen = {}
def extents(name, offset, entries, error):
    seen[name] = entries
h.block_status(h.get_size(), 0, extents)
assert set(seen) == {'base:allocation', 'qemu:allocation-depth'}, seen
assert sum(seen['base:allocation'][0::2]) == h.get_size(), seen
try:
    h.set_strict_mode(0)
    h.pread(512, h.get_size())
    assert False
except nbd.Error as error:
    assert error.errno == 'EINVAL', error
h.shutdown()
";
    let connect = format!("socket = '{}'", text(&place.socket));
    // The python of the system has the module.
    ok_words(&["/usr/bin/python3", "-m", "nbd", "-c", &connect, "-c", script]);
    daemon.stop(&[&place.socket]);
}

#[test]
fn qemu_img_reads_maps_and_converts_it() {
    let place = Place::new("qcow2");
    let daemon = served(&place, &[]);
    let uri = uri(&place.socket, "");
    let root = Path::new("/");
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &uri]);
    let info = qemu_img(root, &["info", "--output=json", &uri]).ok().json();
    assert_eq!(info["virtual-size"], 8 << 20);
    let map = qemu_img(root, &["map", "--output=json", "-f", "raw", &uri]).ok().json();
    let data: Vec<_> = map.as_array().unwrap().iter().filter(|run| run["data"] == true).collect();
    assert_eq!((data.len(), &data[0]["start"]), (1, &Value::from(1 << 20)), "{map}");
    let copy = place.directory.path().join("copy.qcow2");
    let words = ["convert", "-f", "raw", "-O", "qcow2", &uri, text(&copy)];
    qemu_img(root, &words).ok();
    qemu_img(root, &["compare", "-f", "raw", "-F", "qcow2", &uri, text(&copy)]).ok();
    let back = ["convert", "-n", "-f", "qcow2", "-O", "raw", text(&copy), &uri];
    qemu_img(root, &back).ok();
    // 2,000 writes and reads at depth 8: of zeroes where there are zeroes.
    for words in [&["-w", "--pattern=0", "-o", "4M"][..], &[]] {
        let common = ["bench", "-f", "raw", "-d", "8", "-c", "2000", "-s", "512"];
        qemu_img(root, &[&common[..], words, &[&uri]].concat()).ok();
    }
    daemon.stop(&[&place.socket]);
    qemu_img(root, &["check", text(&place.image)]).ok();
    qemu_img(root, &["compare", text(&place.image), text(&copy)]).ok();
}

#[test]
fn a_socket_that_a_killed_server_left_is_replaced_and_others_are_not_touched() {
    let place = Place::new("raw");
    let start = || {
        let words = [text(&place.image), "-f", "raw", "--nbd", text(&place.socket)];
        run(serve_command(&words).arg("--read-only"))
    };
    let daemon = served(&place, &["--read-only"]);
    let finished = start();
    assert_eq!(finished.code(), Some(5), "{}", finished.stderr);
    assert!(finished.stderr.contains("another process listens"), "{}", finished.stderr);
    daemon.kill();
    let daemon = served(&place, &["--read-only"]);
    let output = daemon.process.output();
    assert!(output.contains("was left by a process that is gone; it is replaced"), "{output}");
    assert_eq!(ok_words(&["nbdinfo", "--size", &uri(&place.socket, "")]).trim(), "8388608");
    daemon.stop(&[&place.socket]);
    fs::write(&place.socket, "a file of somebody").unwrap();
    let finished = start();
    assert_eq!(finished.code(), Some(4), "{}", finished.stderr);
    assert!(finished.stderr.contains("is no socket"), "{}", finished.stderr);
    assert_eq!(fs::read_to_string(&place.socket).unwrap(), "a file of somebody");
}

#[test]
fn fio_verifies_what_four_connections_write() {
    let place = Place::new("qcow2");
    let daemon = served(&place, &["--threads", "2"]);
    let uri = format!("--uri={}", uri(&place.socket, ""));
    let mut fio = command(&["fio", "--name=nbd", "--ioengine=nbd", &uri, "--rw=randwrite"]);
    fio.args(["--bs=4k", "--iodepth=16", "--thread", "--numjobs=4", "--size=2m"]);
    fio.args(["--offset_increment=2m", "--verify=crc32c", "--verify_state_save=0"]);
    fio.current_dir(place.directory.path());
    ok(fio);
    let total = &stats(&place.socket)["total"];
    assert!(total["writes"].as_u64().unwrap() >= 2048, "{total}");
    assert_eq!(total["errors"], 0);
    daemon.stop(&[&place.socket]);
    qemu_img(Path::new("/"), &["check", text(&place.image)]).ok();
}

#[test]
fn bitmaps_are_offered_by_name_while_they_stand_still() {
    let place = Place::new("qcow2");
    let (root, image) = (Path::new("/"), text(&place.image));
    ringdisk(root, &["bitmap", "--add", image, "b0"]).ok();
    ok_words(&["qemu-io", "-f", "qcow2", "-c", "write -P 1 4M 64k", image]);
    let words = ["serve", image, "--nbd", text(&place.socket), "--bitmap"];
    ringdisk(root, &[&words[..], &["b0"]].concat()).ends(2).says("'b0' records");
    let none = [&words[..], &["nope", "--read-only"]].concat();
    ringdisk(root, &none).ends(3).says("Bitmap 'nope' is not found");
    let daemon = served(&place, &["--bitmap", "b0", "--read-only"]);
    let map = json(&["nbdinfo", "--json", "--map=qemu:dirty-bitmap:b0", &uri(&place.socket, "")]);
    let dirty: Vec<_> = map.as_array().unwrap().iter().filter(|run| run["type"] == 1).collect();
    assert_eq!((dirty.len(), &dirty[0]["offset"]), (1, &Value::from(4 << 20)), "{map}");
    daemon.stop(&[&place.socket]);
}

#[test]
fn several_disks_are_names_of_one_address_and_are_commanded_alone() {
    let (place, other) = (Place::new("qcow2"), Place::new("raw"));
    let first = format!("image={},export-name=a,format=qcow2", text(&place.image));
    let second = format!("image={},export-name=b,format=raw", text(&other.image));
    let words = ["--disk", &first, "--disk", &second, "--nbd", text(&place.socket)];
    let daemon = Daemon::of(&mut serve_command(&words));
    let list = json(&["nbdinfo", "--list", "--json", &uri(&place.socket, "a")]);
    let names: Vec<_> =
        list["exports"].as_array().unwrap().iter().map(|one| &one["export-name"]).collect();
    assert_eq!(names, ["a", "b"]);
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 64k", &uri(&place.socket, "a")]);
    ctl(&place.socket.join("a"), &["resize", "+1M"]).ok();
    let size = ok_words(&["nbdinfo", "--size", &uri(&place.socket, "a")]);
    assert_eq!(size.trim(), (9 << 20).to_string());
    assert_eq!(stats(&place.socket.join("b"))["size"], 8 << 20);
    ctl(&place.socket.join("b"), &["stop"]).ok();
    daemon.ends(0);
    assert!(!place.socket.exists());
}

#[test]
fn ctl_makes_a_snapshot_under_a_client_and_commits_it() {
    let place = Place::new("qcow2");
    let daemon = served(&place, &[]);
    let uri = uri(&place.socket, "");
    let overlay = place.directory.path().join("over.qcow2");
    let write = |pattern: &str, at: &str| {
        let io = format!("write -P {pattern} {at} 64k");
        ok_words(&["qemu-io", "-f", "raw", "-c", &io, "-c", "flush", &uri]);
    };
    write("1", "0");
    ctl(&place.socket, &["snapshot", text(&overlay)]).ok();
    write("2", "1M");
    ctl(&place.socket, &["commit"]).ok();
    write("3", "2M");
    daemon.stop(&[&place.socket]);
    for (pattern, at) in [("1", "0"), ("2", "1M"), ("3", "2M")] {
        let io = format!("read -P {pattern} {at} 64k");
        ok_words(&["qemu-io", "-f", "qcow2", "-c", &io, text(&place.image)]);
    }
}

#[test]
fn a_port_of_this_machine_serves_and_a_port_in_use_is_refused() {
    let place = Place::new("raw");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = port.to_string();
    let words = [text(&place.image), "-f", "raw", "--nbd", &address];
    let daemon = Daemon::of(&mut serve_command(&words));
    let uri = format!("nbd://127.0.0.1:{port}");
    for target in [format!("127.0.0.1:{port}"), format!(":{port}"), address.clone()] {
        assert_eq!(stats(Path::new(&target))["size"], 8 << 20, "{target}");
    }
    assert_eq!(ok_words(&["nbdinfo", "--size", &uri]).trim(), (8 << 20).to_string());
    let other = Place::new("raw");
    let words = ["serve", text(&other.image), "-f", "raw", "--nbd", &address];
    ringdisk(Path::new("/"), &words).ends(5).says("cannot listen at 127.0.0.1");
    let target = format!("127.0.0.1:{port}");
    ctl(Path::new(&target), &["resize", "+1M"]).ok();
    assert_eq!(ok_words(&["nbdinfo", "--size", &uri]).trim(), (9 << 20).to_string());
    ctl(Path::new(&target), &["stop"]).ok();
    daemon.ends(0);
    ctl(Path::new(&target), &["stats"]).ends(4).says("serves NBD clients at");
}

#[test]
fn disks_of_a_port_are_commanded_by_their_names_also_when_another_was_killed_there() {
    let (place, other) = (Place::new("qcow2"), Place::new("raw"));
    // A server of another test would remove the control sockets that the killed one leaves.
    let own = scratch();
    let serve = |words: &[&str]| {
        let mut command = serve_command(words);
        Daemon::of(command.env("XDG_RUNTIME_DIR", own.path()))
    };
    let ctl = |target: &str, words: &[&str]| {
        let mut asked = command(&[&[&*program(), "ctl", target], words].concat());
        asked.env("XDG_RUNTIME_DIR", own.path());
        asked
    };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("localhost:{port}");
    let first = format!("image={},export-name=a,format=qcow2", text(&place.image));
    let second = format!("image={},export-name=b,format=raw", text(&other.image));
    let words = ["--disk", &first, "--disk", &second, "--nbd", &address];
    let killed = serve(&words);
    let target = |name: &str| format!("{address}/{name}");
    killed.kill();
    let gone = || run(ctl(&target("a"), &["stats"])).stderr;
    until(LIMIT, || gone().contains("is gone").then_some(()))
        .unwrap_or_else(|| panic!("{}", gone()));
    let daemon = serve(&words);
    ok(ctl(&target("a"), &["resize", "+1M"]));
    let size = |name: &str| {
        let stats = ok(ctl(&target(name), &["stats", "--json"]));
        serde_json::from_str::<Value>(&stats).expect("stats")["size"].as_u64()
    };
    assert_eq!((size("a"), size("b")), (Some(9 << 20), Some(8 << 20)));
    ok(ctl(&target("b"), &["stop"]));
    daemon.ends(0);
}

#[test]
fn what_does_not_go_with_nbd_is_refused_in_words() {
    let place = Place::new("raw");
    let root = Path::new("/");
    let image = text(&place.image);
    let disks = ["--disk", &format!("image={image}"), "--disk", &format!("image={image}")];
    for (words, code, text) in [
        (&[image, "--nbd", "/tmp/x/s", "--incoming"][..], 2, "cannot be used with"),
        (&[image, "--nbd", "/tmp/x/s", "--queues", "2"], 2, "add --vhost-user-blk"),
        (&[image, "--nbd", "/tmp/x/s", "--accel", "off"], 2, "--accel is for virtual"),
        (&[image, "--nbd", "/tmp/x/s", "--share-rw"], 2, "NBD clients write anyway"),
        (&[image, "--share-rw", "--vhost-user-blk", "/tmp/s"], 2, "--nbd"),
        (&[image, "--nbd", "host"], 2, "unix:PATH"),
        (&[image, "--nbd", "/tmp/x/s", "--max-connections", "0"], 2, "1 to 10000"),
        (&[image, "--nbd", "/nowhere/s"], 4, "the directory '/nowhere' does not exist"),
        (&[image, "--export-name", "a", "--vhost-user-blk", "/tmp/s"], 2, "add --nbd"),
        (&[&disks[..], &["--nbd", "/tmp/s"]].concat(), 2, "export-name=NAME"),
    ] {
        ringdisk(root, &[&["serve"], words].concat()).ends(code).says(text);
    }
}

/// Client and server of ours speak extended headers with each other.
#[test]
fn our_client_uses_what_our_server_serves() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let daemon = served(&place, &["--threads", "2"]);
        let directory = place.directory.path();
        let uri = uri(&place.socket, "");
        let source = directory.join("source");
        let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at / 555).to_le_bytes()[0]).collect();
        fs::write(&source, &bytes).unwrap();
        ringdisk(directory, &["convert", "-f", "raw", "source", &uri]).ok();
        ringdisk(directory, &["compare", "-f", "raw", "source", &uri]).ok();
        ringdisk(directory, &["convert", "-O", "qcow2", &uri, "copy.qcow2"]).ok();
        ringdisk(directory, &["compare", "-f", "raw", "source", "copy.qcow2"]).ok();
        ringdisk(directory, &["mount", "--daemonize", "-f", "raw", &uri, "mounted"]).ok();
        let mounted = directory.join("mounted");
        assert!(fs::read(&mounted).unwrap() == bytes, "{format}");
        let to = format!("of={}", text(&mounted));
        ok_words(&["dd", "if=/dev/zero", &to, "bs=64k", "count=4", "conv=notrunc,fsync"]);
        ringdisk(directory, &["umount", "mounted"]).ok();
        daemon.stop(&[&place.socket]);
        let copy = ["convert", "-f", format, "-O", "raw", text(&place.image), "end"];
        qemu_img(directory, &copy).ok();
        let end = fs::read(directory.join("end")).unwrap();
        assert!(end[..4 << 16].iter().all(|byte| *byte == 0), "{format}");
        assert!(end[4 << 16..] == bytes[4 << 16..], "{format}");
    }
}
