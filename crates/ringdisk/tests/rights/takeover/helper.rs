//! The line to the helper process: nothing but what it was told of at the start can be had,
//! whatever has become of names and numbers since.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs_root};
use ringdisk_testkit::mount::{Mounted, text};
use ringdisk_testkit::process::{LIMIT, command, ok_words, until};
use rustix::net::{SendFlags, send};

use crate::common::confined::{children, is_gone, of_threads};
use crate::common::{MIB, program, raw_image};
use crate::takeover::agent::{Agent, order};
use crate::takeover::chain::order_with;
use crate::takeover::kept::Kept;
use crate::takeover::out_of_reach::{Others, number};

/// Whether each thread has both filters.
fn is_confined(server: u32) -> bool {
    let filters = of_threads(server, "Seccomp_filters");
    filters.len() > 1 && filters.iter().all(|count| count == "2")
}

/// A mount whose mountpoint is the program's own.
fn made(image: &Path, path: &Path) -> Mounted {
    let program = program();
    let words = [program.as_str(), "mount", "--format", "raw", text(image), text(path)];
    let mut all = command(&["sh", "-c", "rm -f -- \"$0\"; exec \"$@\"", text(path)]);
    Mounted::from_command(all.args(words), path)
}

#[test]
fn what_a_helper_was_not_told_of_cannot_be_had_from_it() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("mountpoint");
    let disk = made(&image, &path);
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    assert_refuses(&line, &others, &image, &path);
    drop(line);
    agent.goes_on();
    assert_eq!(piece(&path, 0, 4096), pattern(1, 0, 4096));
    assert_eq!(disk.stop().code(), Some(0));
    assert!(!path.exists() && image.exists());
}

/// The helper is the process that keeps the mount, has descriptors of it, and may speak to the
/// service manager.
#[test]
fn what_a_parent_keeps_or_was_not_told_of_cannot_be_had_from_it_as_a_helper() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let disk = Kept::start_at(&["--format", "raw", text(&image)], &path);
    // Of the first server and of the next one.
    for _ in 0..2 {
        let server = until(LIMIT, || disk.server().filter(|server| is_confined(*server)));
        let agent = Agent::over(server.expect("it serves"));
        let line = agent.helper_in(disk.0.pid());
        assert_refuses(&line, &others, &image, &path);
        // Both ends of these sockets were made by the parent.
        for socket in agent.all(|name| name.starts_with("socket:")) {
            assert_eq!(order_with(&line, b"H", &socket), b'E');
        }
        // It holds descriptors of other names for the next server, and gives none away.
        let kept = ["ringdisk-origin", "ringdisk-fuse-0", "ringdisk-state"];
        assert!(kept.iter().all(|name| order(&line, b'r', name.as_bytes()) == Some(b'E')));
        drop(line);
        agent.dies();
        assert_eq!(piece(&path, 0, 4096), pattern(1, 0, 4096), "{}", disk.0.output());
    }
    disk.stop();
    assert!(path.exists() && image.exists());
}

/// Nothing can be had from a helper but what is done to its own mount.
fn assert_refuses(line: &OwnedFd, others: &Others, image: &Path, path: &Path) {
    let long = [b'/'; 5000];
    let names = [
        others.mountpoint(),
        others.path("secret"),
        others.path("empty"),
        others.path("socket"),
        others.path("memory"),
        others.path("bound"),
        image.to_owned(),
        path.join("..").join("disk.img"),
        Path::new(std::ffi::OsStr::from_bytes(&long)).to_owned(),
        Path::new("").to_owned(),
    ];
    for name in &names {
        // All letters but those of its own mount, and the one of words for a service manager, which
        // has no answer.
        for what in (0..=255).filter(|what| !b"NLFAW".contains(what)) {
            let answer = order(line, what, name.as_os_str().as_bytes()).expect("it lives");
            let wanted = if what == b'U' { b'D' } else { b'E' };
            assert_eq!(answer, wanted, "{} {}", what.escape_ascii(), name.display());
        }
    }
    others.assert_same();
}

#[test]
fn a_mount_that_has_the_place_and_the_number_of_one_that_is_gone_stays() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let (_other, other_image) = raw_image(MIB, 2);
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let mount =
        |image: &Path| Mounted::start_at(&program(), &["--format", "raw", text(image)], &path);
    let mut first = mount(&image);
    let agent = Agent::over(first.pid());
    let (line, old) = (agent.helper(), number(&path));
    ok_words(&["umount", "-l", text(&path)]);
    let second = mount(&other_image);
    // The lowest number that is free; a mount of another process may have come between.
    if number(&path) == old {
        for what in b"UNLFA" {
            order(&line, *what, b"").expect("it lives");
            assert!(mount_at(&path).is_some(), "{} removed it", what.escape_ascii());
            assert_eq!(piece(&path, 0, 4096), pattern(2, 0, 4096), "{}", what.escape_ascii());
        }
    }
    drop(line);
    first.process().signal(rustix::process::Signal::KILL);
    agent.dies();
    assert_eq!(second.stop().code(), Some(0));
    drop(first);
    assert!(path.exists());
}

#[test]
fn a_helper_that_is_asked_without_end_goes_with_its_process() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = Mounted::start(&program(), &["--format", "raw", text(&image)]);
    let agent = Agent::over(disk.pid());
    let helpers = children(disk.pid());
    let line = agent.helper();
    // Until it stands still because nobody reads its answers.
    for _ in 0..2000 {
        if send(&line, b"X", SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err() {
            break;
        }
    }
    agent.dies();
    drop(line);
    assert!(helpers.iter().all(|helper| is_gone(*helper)));
    ringdisk_testkit::mount::unmount(disk.path());
}
