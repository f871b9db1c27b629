//! Options of `ringdisk nbd` as scripts give them, with real clients: a temporary file, an offset,
//! names and descriptions, bitmaps, the whole text of a list, and signals. Where QEMU 11 is there
//! (`bench/peer`) its `qemu-nbd` says the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{self, pattern};
use ringdisk_testkit::limits::stop_signals;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, ok_words, run, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::nbd_client::NbdClient;
use crate::common::peer::peer;
use crate::common::program;
use crate::common::serving::{Daemon, Place, SIZE, serve_command};
use crate::common::tools::qemu_img;

fn uri(socket: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", text(socket))
}

/// Commands of qemu-io on an export.
fn qemu_io(socket: &Path, commands: &[&str]) {
    let mut words = vec!["qemu-io", "-f", "raw"];
    commands.iter().for_each(|command| words.extend(["-c", command]));
    let uri = uri(socket, "");
    words.push(&uri);
    let out = ok_words(&words);
    assert!(!out.contains("failed"), "{out}");
}

fn json(words: &[&str]) -> Value {
    serde_json::from_str(&ok_words(words)).expect("JSON")
}

/// The first words of `ringdisk nbd`.
fn ours() -> Vec<String> {
    vec![program(), String::from("nbd")]
}

fn command(of: &[String], words: &[&str]) -> Command {
    let mut command = Command::new(&of[0]);
    command.args(&of[1..]).args(words).env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    command
}

/// A server in the foreground, once it listens.
struct Server {
    process: Process,
    socket: PathBuf,
}

impl Server {
    fn of(program: &[String], socket: &Path, words: &[&str]) -> Server {
        let words = [&["-t", "-k", text(socket)], words].concat();
        let mut process = Process::spawn(&mut command(program, &words));
        // What is bound listens a moment later.
        let listens = || std::os::unix::net::UnixStream::connect(socket).is_ok();
        let is_ready = until(LIMIT, || match listens() {
            true => Some(true),
            false => process.ended().map(|_| false),
        });
        assert_eq!(is_ready, Some(true), "{}", process.output());
        Server { process, socket: socket.to_owned() }
    }

    fn start(socket: &Path, words: &[&str]) -> Server {
        Server::of(&ours(), socket, words)
    }

    /// Ends it by a signal, with success and in silence.
    fn ends_by(self, signal: Signal) {
        self.process.signal(signal);
        let ended = self.process.finish(LIMIT);
        assert_eq!(ended.code(), Some(0), "{signal:?}: {}", ended.output());
        assert_eq!(ended.output(), "", "{signal:?}");
        assert!(!self.socket.exists(), "{signal:?}: the socket stays");
    }

    fn stop(self) {
        self.ends_by(Signal::TERM);
    }
}

/// What is said of an error; the exit code is 1.
fn error(of: &[String], words: &[&str]) -> String {
    let ended = run(&mut command(of, words));
    assert_eq!(ended.code(), Some(1), "{words:?}: {}", ended.output());
    // Without the name of the program, which is in front.
    let said = ended.stderr.split_once(": ").expect("a name").1;
    said.to_owned()
}

/// What a server exports.
fn list(of: &[String], socket: &Path) -> String {
    let ended = run(&mut command(of, &["-L", "-k", text(socket)]));
    assert_eq!((ended.code(), ended.stderr.as_str()), (Some(0), ""));
    ended.stdout
}

/// Callers kill servers, remove an image before they end its server, and read what that says.
#[test]
fn a_socket_that_was_left_and_an_image_that_was_removed_are_not_spoken_of() {
    let theirs = peer("qemu-nbd");
    for program in [Some(ours()), theirs].iter().flatten() {
        let place = Place::new("raw");
        let words = ["-f", "raw", text(&place.image)];
        let killed = Server::of(program, &place.socket, &words);
        killed.process.signal(Signal::KILL);
        killed.process.finish(LIMIT);
        assert!(place.socket.exists(), "{program:?}");
        let server = Server::of(program, &place.socket, &words);
        fs::remove_file(&place.image).expect("removed");
        server.stop();
    }
}

#[test]
fn a_temporary_file_takes_what_clients_write_and_goes_with_the_server() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let image = text(&place.image);
        images::qemu_io(&place.image, format, &["write -P 5 0 2M"]);
        let before = fs::read(&place.image).expect("the image");
        let other = place.path("other");
        let words = ["-s", "-f", format, "-e", "3", image];
        // Several of them may use one image.
        let servers = [&place.socket, &other].map(|socket| Server::start(socket, &words));
        qemu_io(&place.socket, &["write -P 7 1M 2M", "discard 4M 1M", "flush"]);
        // The next client sees it, clients of the other server do not.
        qemu_io(&place.socket, &["read -P 5 0 1M", "read -P 7 1M 2M", "read -P 0 3M 5M"]);
        qemu_io(&other, &["read -P 5 0 2M", "read -P 0 2M 6M"]);
        assert!(fs::read(&place.image).expect("the image") == before, "{format}: it was written");
        // One that would write to the image itself is refused.
        let refused = error(&ours(), &["-f", format, "-k", text(&place.path("third")), image]);
        assert!(refused.contains("Failed to get \"write\" lock"), "{refused}");
        let [first, second] = servers;
        first.stop();
        second.process.signal(Signal::KILL);
        second.process.finish(LIMIT);
        assert!(fs::read(&place.image).expect("the image") == before, "{format}: it was written");
        // Without the word the image is as it was; with -r there is nothing to be kept.
        let words = ["-s", "-r", "-f", format, "-e", "3", image];
        let server = Server::start(&place.socket, &words);
        let info = json(&["nbdinfo", "--json", &uri(&place.socket, "")]);
        assert_eq!(info["exports"][0]["is_read_only"], true, "{info}");
        server.stop();
        let server = Server::start(&place.socket, &["-f", format, "-e", "3", image]);
        qemu_io(&place.socket, &["read -P 5 0 2M", "read -P 0 2M 6M", "write -P 6 0 1M"]);
        server.stop();
        assert!(fs::read(&place.image).expect("the image") != before);
    }
}

#[test]
fn an_offset_leaves_out_the_beginning_of_the_disk() {
    const OFFSET: usize = (1 << 20) + 512;
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let image = text(&place.image);
        let (source, copy) = (place.path("source"), place.path("copy"));
        images::raw(&source, SIZE, 9);
        qemu_img(Path::new("/"), &["convert", "-f", "raw", "-O", format, text(&source), image])
            .ok();
        let offset = OFFSET.to_string();
        let words = ["-f", format, "-e", "3", image];
        // Decimal, octal and hexadecimal, as for strtoul(3).
        for number in [offset.clone(), format!("0{OFFSET:o}"), format!("{OFFSET:#x}")] {
            let all = [&["-o", &number][..], &words].concat();
            let server = Server::start(&place.socket, &all);
            let size = ok_words(&["nbdinfo", "--size", &uri(&place.socket, "")]);
            assert_eq!(size.trim(), (SIZE - OFFSET as u64).to_string(), "{number}");
            server.stop();
        }
        let server = Server::start(&place.socket, &[&["-o", &offset][..], &words].concat());
        ok_words(&["nbdcopy", &uri(&place.socket, ""), text(&copy)]);
        let mut bytes = pattern(9, 0, usize::try_from(SIZE).expect("small"));
        assert!(fs::read(&copy).expect("the copy") == bytes[OFFSET..], "{format}");
        qemu_io(&place.socket, &["write -P 7 0 1000", "write -z 2M 64k"]);
        server.stop();
        bytes[OFFSET..OFFSET + 1000].fill(7);
        bytes[OFFSET + (2 << 20)..OFFSET + (2 << 20) + (64 << 10)].fill(0);
        let content = match format {
            "raw" => place.image.clone(),
            _ => images::reference(&place.image, format),
        };
        assert!(fs::read(content).expect("the disk") == bytes, "{format}");
        // Nothing is left of it, and what is past its end.
        let server = Server::start(&place.socket, &[&["-o", "8388608"][..], &words].concat());
        assert_eq!(ok_words(&["nbdinfo", "--size", &uri(&place.socket, "")]).trim(), "0");
        server.stop();
        let behind = [&["-k", text(&place.socket), "-o", "8388609"][..], &words].concat();
        let said = error(&ours(), &behind);
        let wanted =
            "Offset (8388609) cannot be greater than size of the containing file (8388608)\n";
        assert_eq!(said, wanted, "{format}");
        if let Some(theirs) = peer("qemu-nbd") {
            assert_eq!(error(&theirs, &behind), wanted, "{format}");
        }
    }
    for wrong in ["1G", "x", "", "99999999999999999999"] {
        let said = error(&ours(), &["-o", wrong, "-f", "raw", "image"]);
        assert_eq!(said, format!("Invalid offset '{wrong}'\n"));
    }
}

/// An image with a layer below, and two bitmaps that have marked different places.
fn marked(place: &Place) -> PathBuf {
    let d = place.directory.path();
    let base = text(&place.image);
    images::qemu_io(&place.image, "qcow2", &["write -P 1 0 1M"]);
    let top = d.join("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, text(&top)];
    qemu_img(d, &create).ok();
    for (name, write) in [("first", "write -P 2 1M 64k"), ("second", "write -P 3 3M 128k")] {
        qemu_img(d, &["bitmap", "--add", "-f", "qcow2", text(&top), name]).ok();
        images::qemu_io(&top, "qcow2", &[write]);
    }
    top
}

/// Where a map is of this kind: first byte and length of each.
fn ranges(socket: &Path, context: &str, kind: u64) -> Vec<(u64, u64)> {
    let map = format!("--map={context}");
    let map = json(&["nbdinfo", "--json", &map, &uri(socket, "vda")]);
    let all = map.as_array().expect("a list").clone();
    let range = |it: &Value| (it["offset"].as_u64().unwrap(), it["length"].as_u64().unwrap());
    all.iter().filter(|it| it["type"] == kind).map(range).collect()
}

#[test]
fn names_descriptions_depths_and_several_bitmaps_are_offered() {
    let place = Place::new("qcow2");
    let image = marked(&place);
    let image = text(&image);
    let told = "a disk of \"two\" layers; größer";
    let words = ["-x", "vda", "-D", told, "-A", "-B", "first", "--bitmap=second", "-e", "3"];
    let more = ["-f", "qcow2", image];
    let mut lists = Vec::new();
    for program in [Some(ours()), peer("qemu-nbd")].into_iter().flatten() {
        let server = Server::of(&program, &place.socket, &[&words[..], &more].concat());
        let info = json(&["nbdinfo", "--json", &uri(&place.socket, "vda")]);
        let export = &info["exports"][0];
        assert_eq!((&export["export-name"], &export["description"]), (&"vda".into(), &told.into()));
        let (first, second) = ((1 << 20, 64 << 10), (3 << 20, 128 << 10));
        let bitmap = |name: &str| ranges(&place.socket, &format!("qemu:dirty-bitmap:{name}"), 1);
        assert_eq!((bitmap("first"), bitmap("second")), (vec![first, second], vec![second]));
        let depth = |depth| ranges(&place.socket, "qemu:allocation-depth", depth);
        assert_eq!((depth(1), depth(2)), (vec![first, second], vec![(0, 1 << 20)]));
        // The order of contexts is nobody's promise: QEMU's is the reverse.
        let sorted = |list: String| {
            let mut lines: Vec<String> = list.lines().map(str::to_owned).collect();
            let contexts = lines.iter().position(|line| line.contains("contexts")).expect("some");
            lines[contexts..].sort();
            lines
        };
        lists.push(sorted(list(&ours(), &place.socket)));
        server.process.signal(Signal::TERM);
        server.process.finish(LIMIT);
    }
    assert!(lists.windows(2).all(|pair| pair[0] == pair[1]), "{lists:#?}");
    let wanted = format!(
        "exports available: 1\n export: 'vda'\n  description: {told}\n  size:  8388608\n  \
         flags: 0x1ded ( flush fua trim zeroes df multi cache fast-zero block-status-payload )\n  \
         min block: 1\n  opt block: 4096\n  max block: 33554432\n  transaction size: 64-bit\n   \
         base:allocation\n   qemu:allocation-depth\n   qemu:dirty-bitmap:first\n   \
         qemu:dirty-bitmap:second\n  available meta contexts: 4"
    );
    assert_eq!(lists[0].join("\n"), wanted);
    // Of several bitmaps each has to be there.
    let gone = ["-B", "first", "-B", "gone", "-f", "qcow2", "-k", text(&place.socket), image];
    assert_eq!(error(&ours(), &gone), "Bitmap 'gone' is not found\n");
    for (option, what) in [("-D", "export description"), ("-x", "export name")] {
        let long = "x".repeat(4097);
        let said = error(&ours(), &[option, &long, "-f", "qcow2", image]);
        assert_eq!(said, format!("{what} '{long}' too long\n"));
    }
}

#[test]
fn a_list_shows_all_exports_of_a_server() {
    let (one, two) = (Place::new("raw"), Place::new("qcow2"));
    let spec = |place: &Place, more: &str| {
        format!("image={},format={},{more}", text(&place.image), place.format)
    };
    let first = spec(&one, "export-name=one,read-only,description=it is read only");
    let second = spec(&two, "export-name=two/b");
    let words = ["--disk", &first, "--disk", &second, "--nbd", text(&one.socket)];
    let daemon = Daemon::of(&mut serve_command(&words));
    let text = "exports available: 2
 export: 'one'
  description: it is read only
  size:  8388608
  flags: 0x158f ( readonly flush fua df multi cache block-status-payload )
  min block: 1
  opt block: 4096
  max block: 33554432
  transaction size: 64-bit
  available meta contexts: 2
   base:allocation
   qemu:allocation-depth
 export: 'two/b'
  size:  8388608
  flags: 0x1ded ( flush fua trim zeroes df multi cache fast-zero block-status-payload )
  min block: 1
  opt block: 4096
  max block: 33554432
  transaction size: 64-bit
  available meta contexts: 2
   base:allocation
   qemu:allocation-depth
";
    assert_eq!(list(&ours(), &one.socket), text);
    if let Some(theirs) = peer("qemu-nbd") {
        assert_eq!(list(&theirs, &one.socket), text);
    }
    let settings: [&[&str]; 9] = [
        &["-D", "x"],
        &["-o", "1"],
        &["-B", "x"],
        &["-A"],
        &["-f", "raw"],
        &["-l", "x"],
        &["-n"],
        &["--aio=threads"],
        &["--discard=unmap"],
    ];
    for words in settings {
        for program in [Some(ours()), peer("qemu-nbd")].iter().flatten() {
            let said = error(program, &[&["-L"], words].concat());
            assert_eq!(said, "List mode is incompatible with per-device settings\n", "{words:?}");
        }
    }
    let said = error(&ours(), &["-L", "image"]);
    assert_eq!(said, "List mode is incompatible with a file name\n");
    daemon.stop(&[&one.socket]);
}

#[test]
fn each_signal_that_asks_for_an_end_ends_it_cleanly() {
    for signal in stop_signals() {
        let place = Place::new("qcow2");
        let pid_file = place.path("pid");
        let words = ["-e", "3", "-f", "qcow2", "--pid-file", text(&pid_file)];
        let server = Server::start(&place.socket, &[&words[..], &[text(&place.image)]].concat());
        // It is there when the socket listens, or a moment later.
        let pid = || fs::read_to_string(&pid_file).ok().filter(|pid| pid.ends_with('\n'));
        let pid = until(LIMIT, pid).expect("a pid");
        assert_eq!(pid.trim(), server.process.pid().to_string());
        // With a client, who loses nothing that was answered.
        let mut client = NbdClient::connect(&place.socket, "");
        client.write(3 << 20, &[9; 70_000]).expect("a server");
        server.ends_by(signal);
        assert!(!pid_file.exists(), "{signal:?}");
        images::assert_clean(&place.image);
        images::qemu_io(&place.image, "qcow2", &["read -P 9 3M 70000"]);
    }
    // In the background, too.
    for signal in stop_signals() {
        let place = Place::new("raw");
        let pid_file = place.path("pid");
        let words = ["-t", "--fork", "-f", "raw", "-k", text(&place.socket), "--pid-file"];
        let words = [&words[..], &[text(&pid_file), text(&place.image)]].concat();
        let started = run(&mut command(&ours(), &words));
        assert_eq!((started.code(), started.output()), (Some(0), String::new()));
        let pid = fs::read_to_string(&pid_file).expect("a pid").trim().to_owned();
        ok_words(&["kill", &format!("-{}", signal.as_raw()), &pid]);
        let process = Path::new("/proc").join(pid);
        until(LIMIT, || (!process.exists()).then_some(())).expect("it ends");
        assert!(!place.socket.exists() && !pid_file.exists(), "{signal:?}");
    }
}
