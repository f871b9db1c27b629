//! What a server that was taken over does to images that its own chain leads to, or that it writes
//! the names of into its own: it may read those below its disk, and the next start follows no name
//! that it wrote.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{command, has};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};

use crate::common::tools::{Ran, ringdisk};
use crate::common::{MIB, open, program};
use crate::takeover::agent::{Agent, give, order};
use crate::takeover::out_of_reach::{identity, overlay_of, qcow2, with_data_file};

/// A raw base with two overlays.
fn shared() -> tempfile::TempDir {
    let directory = scratch();
    images::raw(&directory.path().join("base"), MIB, 1);
    for name in ["mine.qcow2", "yours.qcow2"] {
        let path = directory.path().join(name);
        let bytes = overlay_of(Path::new("base"), &path);
        fs::write(path, bytes).expect("an image");
    }
    directory
}

fn mounted(image: &Path) -> Mounted {
    Mounted::start(&program(), &["--format", "qcow2", text(image)])
}

fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

fn has_landlock(disk: &Mounted) -> bool {
    let stats = ctl(disk, &["stats", "--json"]).ok().json();
    let has = stats["sandbox"].as_str().is_some_and(|text| text.starts_with("landlock"));
    needs("a kernel with landlock", has)
}

fn numbers(path: &Path) -> Vec<u8> {
    let (device, inode) = identity(path);
    format!("{device}\0{inode}").into_bytes()
}

/// The letter of the answer to an order with a descriptor.
pub(crate) fn order_with(line: &OwnedFd, what: &[u8], given: &OwnedFd) -> u8 {
    give(line, what, &[given.as_fd()]);
    let mut ready = [PollFd::new(line, PollFlags::IN)];
    assert_eq!(poll(&mut ready, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })), Ok(1), "no answer");
    let mut answer = [0; 8192];
    let (len, _) = recv(line, &mut answer[..], RecvFlags::empty()).expect("an answer");
    answer[..len][0]
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_base_that_disks_share_is_read_by_each_and_written_by_none() {
    use std::ffi::CString;

    use crate::probe::inject::{Puppet, Refused};

    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = shared();
    let disk = mounted(&directory.path().join("mine.qcow2"));
    if !has_landlock(&disk) {
        return;
    }
    let mut puppet = Puppet::of(disk.pid());
    let mut opened = |name: &str, flags| {
        let name = CString::new(text(&directory.path().join(name))).expect("a name");
        puppet.open(&name, flags, 0)
    };
    let refused = Err(Refused::With(libc::EACCES));
    assert_eq!(opened("mine.qcow2", libc::O_RDWR), Ok(()));
    assert_eq!(opened("base", libc::O_RDONLY), Ok(()));
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_WRONLY | libc::O_TRUNC] {
        assert_eq!(opened("base", flags), refused);
        assert_eq!(opened("yours.qcow2", flags), refused);
    }
    assert_eq!(opened("yours.qcow2", libc::O_RDONLY), refused);
    puppet.release();
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn only_a_user_who_asks_has_the_helper_open_a_base_to_write_it() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = shared();
    let path = |name: &str| directory.path().join(name);
    let before = fs::read(path("base")).expect("read");
    let disk = mounted(&path("mine.qcow2"));
    if !has_landlock(&disk) {
        return;
    }
    let taken = Agent::over(disk.pid());
    let line = taken.helper();
    let tries = |what: &str| {
        for name in ["base", "yours.qcow2", "mine.qcow2"] {
            assert_eq!(order(&line, b'w', &numbers(&path(name))), Some(b'E'), "{what}: {name}");
            for letter in *b"nb" {
                let note = [&numbers(&path(name))[..], b"\0yours.qcow2:qcow2;"].concat();
                assert_eq!(order(&line, letter, &note), Some(b'E'), "{what}: {name}");
            }
        }
    };
    tries("nothing was said");
    assert_eq!(order(&line, b'H', b""), Some(b'E'));
    // Whatever it has itself is no user's word.
    for socket in taken.all(|name| name.starts_with("socket:")) {
        assert_eq!(order_with(&line, b"H", &socket), b'E');
    }
    tries("it has said something itself");
    drop(line);
    taken.goes_on();
    assert_eq!(fs::read(path("base")).expect("read"), before);
    // A user's command writes it, and the right to goes with the command.
    open(disk.path()).write_all_at(&pattern(2, 0, 4096), 0).expect("write");
    for name in ["a.qcow2", "b.qcow2"] {
        ctl(&disk, &["snapshot", text(&path(name))]).ok();
    }
    let [mine, base] = ["mine.qcow2", "base"].map(path);
    ctl(&disk, &["commit", "--quiet", "--top", text(&mine), "--base", text(&base)]).ok();
    assert_eq!(piece(&base, 0, 4096), pattern(2, 0, 4096));
    let taken = Agent::over(disk.pid());
    let line = taken.helper();
    assert_eq!(order(&line, b'w', &numbers(&base)), Some(b'E'), "the command is over");
    drop(line);
    taken.goes_on();
    ctl(&disk, &["commit", "--quiet"]).ok();
    ctl(&disk, &["commit", "--quiet"]).ok();
    // What is on top now is written, and opened again, like any other.
    ctl(&disk, &["resize", "+1M"]).ok();
    assert_eq!(piece(disk.path(), 0, 4096), pattern(2, 0, 4096));
    assert_eq!(disk.stop().code(), Some(0));
}

/// Writes bytes over the image of a process, as the process can, and ends it.
fn rewrite(disk: Mounted, image: &Path, bytes: &[u8]) {
    let taken = Agent::over(disk.pid());
    let own = taken.all(|name| name == text(image));
    let is_written = own
        .into_iter()
        .map(File::from)
        .any(|own| own.write_all_at(bytes, 0).and_then(|()| own.sync_all()).is_ok());
    assert!(is_written, "it has its image open");
    let path = disk.path().to_owned();
    taken.dies();
    drop(disk);
    ringdisk_testkit::mount::unmount(&path);
}

#[test]
fn a_neighbour_that_is_named_in_the_header_is_not_followed_by_the_next_start() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    for (role, name_of) in
        [("backing", overlay_of as fn(&Path, &Path) -> Vec<u8>), ("data", with_data_file)]
    {
        let directory = scratch();
        let path = |name: &str| directory.path().join(name);
        images::raw(&path("yours"), MIB, 7);
        let before = fs::read(path("yours")).expect("read");
        let forged = name_of(&path("yours"), &path("made"));
        qcow2(&path("mine.qcow2"));
        let image = path("mine.qcow2");
        rewrite(mounted(&image), &image, &forged);
        let place = path("place");
        for words in [
            &["mount", "--format", "qcow2", text(&image), text(&place)][..],
            &["mount", text(&image), text(&place)],
            &["mount", "--sandbox", "off", text(&image), text(&place)],
            &["serve", text(&image), "--vhost-user-blk", text(&path("socket"))],
            &["convert", "-O", "raw", text(&image), text(&path("copy"))],
            &["commit", text(&image)],
            &["resize", text(&image), "+1M"],
        ] {
            let ran = ringdisk(directory.path(), words);
            assert_ne!(ran.code, 0, "{role}: {words:?}");
            let remedy = if role == "data" { "--allow-path" } else { "ringdisk rebase -u" };
            assert!(ran.err.contains(remedy), "{role}: {words:?}: {}", ran.err);
        }
        assert_eq!(fs::read(path("yours")).expect("read"), before, "{role}");
        // If the user has written it: one word, once.
        let yours = path("yours");
        let allow = ["--allow-path", text(&yours), "--format", "qcow2", text(&image)];
        let disk = Mounted::start(&program(), &allow);
        assert_eq!(piece(disk.path(), 0, 4096), pattern(7, 0, 4096), "{role}");
        assert_eq!(disk.stop().code(), Some(0));
        assert_eq!(mounted(&image).stop().code(), Some(0), "{role}");
    }
}

#[test]
fn what_commands_change_is_followed_by_the_next_start() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = shared();
    let path = |name: &str| directory.path().join(name);
    let disk = mounted(&path("mine.qcow2"));
    for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
        ctl(&disk, &["snapshot", text(&path(name))]).ok();
    }
    // The one above the merged layer names another one: below the top, and the top.
    for (top, base) in [("a.qcow2", "mine.qcow2"), ("b.qcow2", "mine.qcow2")] {
        let [top, base] = [top, base].map(path);
        ctl(&disk, &["commit", "--quiet", "--top", text(&top), "--base", text(&base)]).ok();
    }
    assert_eq!(disk.stop().code(), Some(0));
    let disk = mounted(&path("c.qcow2"));
    let stats = ctl(&disk, &["stats", "--json"]).ok().json();
    assert_eq!(stats["layers"].as_array().map(Vec::len), Some(3), "{stats}");
    // Another chain with the same bytes.
    ctl(&disk, &["snapshot", text(&path("d.qcow2"))]).ok();
    ctl(&disk, &["backing", "--quiet", "-F", "qcow2", text(&path("mine.qcow2"))]).ok();
    assert_eq!(disk.stop().code(), Some(0));
    let disk = mounted(&path("d.qcow2"));
    assert_eq!(piece(disk.path(), 4096, 4096), pattern(1, 4096, 4096));
    ctl(&disk, &["commit", "--quiet"]).ok();
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn an_image_with_any_characters_in_its_name_is_followed_below_an_overlay() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    for name in ["disk(1).qcow2", "Büro.qcow2", "vm#1~.qcow2"] {
        let directory = scratch();
        let [image, overlay] = [name, "o.qcow2"].map(|name| directory.path().join(name));
        qcow2(&image);
        let disk = mounted(&image);
        open(disk.path()).write_all_at(&pattern(3, 0, 4096), 0).expect("write");
        ctl(&disk, &["snapshot", text(&overlay)]).ok();
        assert_eq!(disk.stop().code(), Some(0), "{name}");
        let disk = mounted(&overlay);
        assert_eq!(piece(disk.path(), 0, 4096), pattern(3, 0, 4096), "{name}");
        assert_eq!(disk.stop().code(), Some(0), "{name}");
    }
}

#[test]
fn a_file_that_the_process_may_write_is_noted_as_no_image_with_names() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = scratch();
    let path = |name: &str| directory.path().join(name);
    let create = ["qemu-img", "create", "-qf", "qcow2", "-o", "data_file=data", "top.qcow2", "1M"];
    let mut create = command(&create);
    assert!(create.current_dir(directory.path()).status().expect("qemu-img").success());
    let disk = mounted(&path("top.qcow2"));
    ctl(&disk, &["snapshot", text(&path("o.qcow2"))]).ok();
    if !has_landlock(&disk) {
        return;
    }
    let taken = Agent::over(disk.pid());
    let line = taken.helper();
    let note = |names: &str| [&numbers(&path("o.qcow2"))[..], b"\0", names.as_bytes()].concat();
    for names in ["data:qcow2;", "top.qcow2:raw;", "data:;"] {
        assert_eq!(order(&line, b'n', &note(names)), Some(b'E'), "{names}");
    }
    assert_eq!(order(&line, b'n', &note("top.qcow2:qcow2;")), Some(b'D'));
    drop(line);
    taken.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
    // What it writes into the data file is the header of no image.
    let forged = overlay_of(Path::new("secret"), &path("made"));
    images::raw(&path("secret"), MIB, 7);
    let data = File::options().write(true).open(path("data")).expect("open");
    data.write_all_at(&forged, 0).expect("write");
    let place = path("place");
    let words = ["mount", "--format", "qcow2", text(&path("data")), text(&place)].map(String::from);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ran = ringdisk(directory.path(), &words);
    assert_eq!(ran.code, 6, "{}", ran.err);
}

#[test]
fn a_new_backing_file_that_the_user_allowed_is_followed_by_the_next_start() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = shared();
    let path = |name: &str| directory.path().join(name);
    fs::copy(path("base"), path("copy")).expect("copy");
    let top = path("mine.qcow2");
    let copy = path("copy.qcow2");
    fs::write(&copy, overlay_of(Path::new("copy"), &copy)).expect("an image");
    let (allow, raw) = ("--allow-path", path("copy"));
    let raw = text(&raw);
    let words = ["--format", "qcow2", allow, raw, allow, text(&copy), text(&top)];
    let disk = Mounted::start(&program(), &words);
    ctl(&disk, &["backing", "--quiet", "-F", "qcow2", text(&copy)]).ok();
    assert_eq!(disk.stop().code(), Some(0));
    let disk = mounted(&top);
    assert_eq!(piece(disk.path(), 4096, 4096), pattern(1, 4096, 4096));
    assert_eq!(disk.stop().code(), Some(0));
}
