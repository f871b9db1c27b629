//! Names that try to leave the allowed directories, and files that change while they are opened.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use tempfile::TempDir;

use super::directory;
use crate::name::shell_path;
use crate::resolve::{Access, Held, Resolver};
use crate::{Cause, Error, ErrorKind};

const READ: Access = Access { write: false, direct: false };

/// A directory with `inside/` (file `base`, directory `sub/` with file `base`) and `outside/` (file
/// `secret`).
fn tree() -> TempDir {
    let directory = directory();
    for (name, text) in [
        ("inside/base", "inside"),
        ("inside/sub/base", "below"),
        ("outside/secret", "secret"),
        ("outside/base", "secret"),
    ] {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, text).expect("write");
    }
    directory
}

/// Opens a name seen from `inside/`, which is all that is allowed, and reads it.
fn open(tree: &TempDir, name: &str) -> Result<String, Error> {
    open_with(tree, name, &[])
}

fn open_with(tree: &TempDir, name: &str, more: &[PathBuf]) -> Result<String, Error> {
    let inside = tree.path().join("inside");
    let mut allowed = vec![inside.clone()];
    allowed.extend_from_slice(more);
    let resolver = Resolver::new(&allowed)?;
    read(&resolver, &inside.join(name))
}

fn read(resolver: &Resolver, path: &Path) -> Result<String, Error> {
    let opened = resolver.open(path, READ)?;
    let mut text = String::new();
    File::from(opened.fd).read_to_string(&mut text).expect("read");
    Ok(text)
}

fn kind(result: Result<String, Error>) -> ErrorKind {
    result.expect_err("refused").kind()
}

#[test]
fn files_inside_are_opened() {
    let tree = tree();
    for (name, text) in [
        ("base", "inside"),
        ("./base", "inside"),
        ("sub/base", "below"),
        ("sub/../base", "inside"),
        ("sub//./base", "below"),
        ("../inside/base", "inside"),
    ] {
        assert_eq!(open(&tree, name).expect(name), text);
    }
    let absolute = tree.path().join("inside/sub/base");
    assert_eq!(open(&tree, absolute.to_str().expect("text")).expect("absolute"), "below");
}

#[test]
fn names_that_lead_outside_are_refused_with_advice() {
    let tree = tree();
    let absolute = tree.path().join("outside/secret");
    for name in [
        "../outside/secret",
        "sub/../../outside/secret",
        "../../../../../../../../etc/passwd",
        "/etc/passwd",
        "/proc/self/cwd/etc/passwd",
        "..",
        "/",
        absolute.to_str().expect("text"),
    ] {
        let error = open(&tree, name).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{name}: {error}");
        assert!(error.message().contains("--allow-path"), "{error}");
        assert!(error.message().contains("inside"), "{error}");
        assert_eq!(error.cause(), Some(&Cause::PathNotAllowed));
    }
}

#[test]
fn what_is_outside_is_not_even_looked_for() {
    let tree = tree();
    assert_eq!(kind(open(&tree, "../nothing")), ErrorKind::NotAllowed);
    assert_eq!(kind(open(&tree, "../outside/nothing")), ErrorKind::NotAllowed);
    assert_eq!(kind(open(&tree, "nothing")), ErrorKind::NotFound);
    assert_eq!(kind(open(&tree, "base/nothing")), ErrorKind::NotFound);
}

#[test]
fn links_inside_are_followed_and_links_outside_are_not() {
    let tree = tree();
    let link = |to: &str, name: &str| {
        symlink(to, tree.path().join("inside").join(name)).expect("link");
    };
    let inside = tree.path().join("inside");
    let inside = inside.to_str().expect("text");
    link("base", "relative");
    link("sub/base", "below");
    link("sub", "directory");
    link(&format!("{inside}/base"), "absolute");
    link(&format!("{inside}/sub"), "absolute-directory");
    link("../inside/base", "out-and-in");
    link("relative", "twice");
    for (name, text) in [
        ("relative", "inside"),
        ("below", "below"),
        ("directory/base", "below"),
        ("absolute", "inside"),
        ("absolute-directory/base", "below"),
        ("absolute-directory/../base", "inside"),
        ("out-and-in", "inside"),
        ("twice", "inside"),
    ] {
        assert_eq!(open(&tree, name).expect(name), text);
    }
    link("../outside/secret", "escape");
    link("../outside", "escape-directory");
    link("/etc/passwd", "escape-absolute");
    link("/proc/self/cwd", "magic");
    link("escape", "escape-twice");
    for name in [
        "escape",
        "escape-directory/secret",
        "escape-absolute",
        "magic/base",
        "escape-twice",
        "sub/../escape",
    ] {
        assert_eq!(kind(open(&tree, name)), ErrorKind::NotAllowed, "{name}");
    }
    link("nothing", "dangling");
    assert_eq!(kind(open(&tree, "dangling")), ErrorKind::NotFound);
}

#[test]
fn loops_of_links_end() {
    let tree = tree();
    let inside = tree.path().join("inside");
    symlink("b", inside.join("a")).expect("link");
    symlink("a", inside.join("b")).expect("link");
    symlink("c/c", inside.join("c")).expect("link");
    symlink(inside.join("d"), inside.join("d")).expect("link");
    for name in ["a", "c", "d", "a/base"] {
        assert_eq!(kind(open(&tree, name)), ErrorKind::Loop, "{name}");
    }
    let long = "sub/../".repeat(3000) + "base";
    assert_eq!(kind(open(&tree, &long)), ErrorKind::Io);
}

#[test]
fn more_directories_and_single_files_can_be_allowed() {
    let tree = tree();
    let outside = tree.path().join("outside");
    let secret = outside.join("secret");
    symlink(&secret, tree.path().join("inside/link")).expect("link");
    let directory = [outside.clone()];
    for name in ["../outside/secret", "link", secret.to_str().expect("text")] {
        assert_eq!(open_with(&tree, name, &directory).expect(name), "secret");
    }
    let file = [secret.clone()];
    for name in ["link", secret.to_str().expect("text")] {
        assert_eq!(open_with(&tree, name, &file).expect(name), "secret");
    }
    let sibling = open_with(&tree, "../outside/base", &file);
    assert_eq!(kind(sibling), ErrorKind::NotAllowed);
    let error = Resolver::new(&[outside.join("nothing")]).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn the_way_out_that_a_refusal_names_works() {
    let tree = tree();
    symlink("../outside/secret", tree.path().join("inside/link")).expect("link");
    for name in ["link", "../outside/secret", "sub/../../outside/secret"] {
        let path = tree.path().join("inside").join(name);
        let error = open(&tree, name).expect_err("refused");
        let advice = format!("--allow-path {}", shell_path(&path));
        assert!(error.message().contains(&advice), "{error}");
        assert_eq!(open_with(&tree, name, &[path]).expect(name), "secret");
    }
}

#[test]
fn an_allowed_directory_may_be_named_through_a_link() {
    let tree = tree();
    symlink("inside", tree.path().join("alias")).expect("link");
    let resolver = Resolver::new(&[tree.path().join("alias")]).expect("allow");
    for name in ["alias/base", "inside/base"] {
        assert_eq!(read(&resolver, &tree.path().join(name)).expect(name), "inside");
    }
}

#[test]
fn a_file_that_was_allowed_stays_that_file() {
    let tree = tree();
    let path = tree.path().join("inside/base");
    let resolver = Resolver::new(std::slice::from_ref(&path)).expect("allow");
    fs::rename(tree.path().join("outside/secret"), &path).expect("rename");
    assert_eq!(read(&resolver, &path).expect("open"), "inside");
    let path = tree.path().join("inside/sub/base");
    let held = Held::named(&path).expect("hold");
    fs::rename(tree.path().join("outside/base"), &path).expect("rename");
    let mut text = String::new();
    File::from(held.open(READ, None).expect("open").fd).read_to_string(&mut text).expect("read");
    assert_eq!(text, "below");
}

#[test]
fn fifos_and_devices_are_not_opened() {
    let tree = tree();
    let inside = tree.path().join("inside");
    mknodat(CWD, inside.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("fifo");
    symlink("fifo", inside.join("link")).expect("link");
    // A FIFO without a writer would block an open for ever.
    for name in ["fifo", "link", "sub", "."] {
        assert_eq!(kind(open(&tree, name)), ErrorKind::NotAnImage, "{name}");
    }
    let devices = [PathBuf::from("/dev")];
    assert_eq!(kind(open_with(&tree, "/dev/null", &devices)), ErrorKind::NotAnImage);
    assert_eq!(kind(open_with(&tree, "/dev/tty", &devices)), ErrorKind::NotAnImage);
}

#[test]
fn opened_files_are_left_blocking_and_closed_on_exec() {
    let tree = tree();
    let inside = tree.path().join("inside");
    let resolver = Resolver::new(std::slice::from_ref(&inside)).expect("allow");
    let opened = resolver.open(&inside.join("base"), READ).expect("open");
    let flags = rustix::fs::fcntl_getfl(&opened.fd).expect("flags");
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    let flags = rustix::io::fcntl_getfd(&opened.fd).expect("flags");
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

/// Exchanges two names of a directory until it is told to stop, while `attack` is opened over and
/// over. Everything that is opened must be from inside.
fn race(tree: &TempDir, one: &str, other: &str, attack: &str) {
    let inside = tree.path().join("inside");
    let resolver = Resolver::new(std::slice::from_ref(&inside)).expect("allow");
    let stop = AtomicBool::new(false);
    let (mut opened, mut refused) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (one, other) = (tree.path().join(one), tree.path().join(other));
            while !stop.load(Ordering::Relaxed) {
                let exchange = RenameFlags::EXCHANGE;
                renameat_with(CWD, &one, CWD, &other, exchange).expect("exchange");
            }
        });
        let end = Instant::now() + Duration::from_millis(400);
        while Instant::now() < end {
            match read(&resolver, &inside.join(attack)) {
                Ok(text) => {
                    assert_ne!(text, "secret", "left the allowed directory");
                    opened += 1;
                }
                Err(_) => refused += 1,
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    // Both sides of the race were seen, or the test shows nothing.
    assert!(opened > 0, "never opened, {refused} refused");
}

#[test]
fn a_file_that_changes_into_a_link_does_not_lead_outside() {
    let tree = tree();
    symlink("../outside/secret", tree.path().join("inside/link")).expect("link");
    race(&tree, "inside/base", "inside/link", "base");
}

#[test]
fn a_directory_that_changes_into_a_link_does_not_lead_outside() {
    let tree = tree();
    symlink("../outside", tree.path().join("inside/link")).expect("link");
    race(&tree, "inside/sub", "inside/link", "sub/base");
}

#[test]
fn a_directory_that_is_moved_away_does_not_lead_outside() {
    let tree = tree();
    // While "sub/deep" is walked it moves to another place, where ".." is another directory.
    fs::create_dir_all(tree.path().join("inside/sub/deep")).expect("mkdir");
    fs::create_dir_all(tree.path().join("outside/deep")).expect("mkdir");
    race(&tree, "inside/sub/deep", "outside/deep", "sub/deep/../base");
}

#[test]
fn a_file_that_changes_into_a_fifo_does_not_block() {
    let tree = tree();
    let fifo = tree.path().join("inside/fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("fifo");
    race(&tree, "inside/base", "inside/fifo", "base");
}
