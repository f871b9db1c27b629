use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use ringdisk_disk::names_note;
use ringdisk_storage::Storage;
use tempfile::TempDir;

use super::super::named::named;
use super::super::tasks::Tasks;
use super::*;

/// A directory of images that the helper process was told of, another one, and what it holds.
struct World {
    root: TempDir,
    overlays: Overlays,
}

impl World {
    fn new() -> World {
        let root = tempfile::tempdir().expect("a directory");
        for name in ["images", "images/below", "other"] {
            fs::create_dir(root.path().join(name)).expect("mkdir");
        }
        for name in ["images/neighbour", "other/secret"] {
            fs::write(root.path().join(name), "theirs").expect("write");
        }
        symlink("neighbour", root.path().join("images/link")).expect("a link");
        symlink("nothing", root.path().join("images/dangling")).expect("a link");
        symlink("../other", root.path().join("images/elsewhere")).expect("a link");
        let directory = root.path().join("images");
        let told = named(directory).expect("it is there");
        World { overlays: Overlays::hold(&[told], &[], None, "", &[]), root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn id(&self, name: &str) -> Id {
        let meta = fs::symlink_metadata(self.path(name)).expect("it is there");
        (meta.dev(), meta.ino())
    }

    fn order(&mut self, what: u8, id: Id, name: &[u8]) -> Answer {
        let mut fields = format!("{}\0{}", id.0, id.1).into_bytes();
        if !name.is_empty() {
            fields.push(0);
            fields.extend_from_slice(name);
        }
        self.overlays.carry_out(what, &fields).expect("an order of this kind")
    }

    /// Makes a file in the directory of images.
    fn make(&mut self, name: &str) -> Answer {
        let directory = self.id("images");
        self.order(MAKE, directory, name.as_bytes())
    }

    /// Every file below the root with what is in it, links as links.
    fn all(&self) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        let mut left = vec![self.root.path().to_owned()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory).expect("a directory").flatten() {
                let (path, kind) = (entry.path(), entry.file_type().expect("a type"));
                if kind.is_dir() {
                    left.push(path);
                } else if kind.is_symlink() {
                    let text = fs::read_link(&path).expect("a link").display().to_string();
                    found.push((path, text));
                } else {
                    let text = fs::read_to_string(&path).expect("read");
                    found.push((path, text));
                }
            }
        }
        found.sort();
        found
    }
}

#[track_caller]
fn refused(answer: &Answer, errno: Errno) {
    assert_eq!((answer.kind, answer.words.clone()), (REFUSED, errno.raw_os_error().to_string()));
    assert!(answer.fd.is_none());
}

#[track_caller]
fn file(answer: Answer) -> File {
    assert_eq!(answer.kind, DONE, "{}", answer.words);
    File::from(answer.fd.expect("a descriptor"))
}

#[test]
fn a_file_is_made_opened_again_and_removed() {
    let mut world = World::new();
    let mut made = file(world.make("new"));
    made.write_all(b"ours").expect("it can be written");
    let id = world.id("images/new");
    let mut again = file(world.order(READ, id, b""));
    let mut text = String::new();
    again.read_to_string(&mut text).expect("read");
    assert_eq!(text, "ours");
    assert!(again.write_all(b"x").is_err(), "for reading only");
    let mut again = file(world.order(WRITE, id, b""));
    again.write_all(b"O").expect("it can be written");
    // Under any name.
    fs::rename(world.path("images/new"), world.path("other/moved")).expect("rename");
    file(world.order(WRITE, id, b""));
    refused(&world.order(REMOVE, id, b""), Errno::NOENT);
    assert!(world.path("other/moved").exists());
    file(world.make("new"));
    let id = world.id("images/new");
    assert_eq!(world.order(REMOVE, id, b"").kind, DONE);
    assert!(!world.path("images/new").exists());
    refused(&world.order(WRITE, id, b""), Errno::ACCESS);
    assert_eq!(world.order(SYNC, world.id("images"), b"").kind, DONE);
}

#[test]
fn a_file_has_mode_and_owner_of_one_that_the_process_makes() {
    let mut world = World::new();
    file(world.make("new"));
    let options = ringdisk_storage::OpenOptions {
        create_new: true,
        ..ringdisk_storage::OpenOptions::default()
    };
    Storage::open(&world.path("images/own"), &options).expect("made");
    let of = |name: &str| {
        let meta = fs::metadata(world.path(name)).expect("it is there");
        (meta.permissions().mode(), meta.uid(), meta.gid(), meta.len())
    };
    assert_eq!(of("images/new"), of("images/own"));
}

#[test]
fn names_that_lead_elsewhere_or_to_something_make_nothing() {
    let mut world = World::new();
    let before = world.all();
    for name in ["", ".", "..", "/", "../new", "../other/new", "below/new", "./new", "new/", "/new"]
    {
        refused(&world.make(name), Errno::ACCESS);
    }
    for name in ["neighbour", "link", "dangling", "elsewhere", "below"] {
        refused(&world.make(name), Errno::EXIST);
    }
    let zero = format!("{}\0{}\0new\0x", world.id("images").0, world.id("images").1);
    refused(&world.overlays.carry_out(MAKE, zero.as_bytes()).expect("an order"), Errno::ACCESS);
    let long = "n".repeat(256);
    refused(&world.make(&long), Errno::NAMETOOLONG);
    assert_eq!(world.all(), before);
}

#[test]
fn other_directories_and_files_are_none_of_its() {
    let mut world = World::new();
    let made = file(world.make("new"));
    let before = world.all();
    for name in ["other", "images/below", "images/neighbour", "images/new", "images/elsewhere"] {
        refused(&world.order(MAKE, world.id(name), b"more"), Errno::ACCESS);
        refused(&world.order(SYNC, world.id(name), b""), Errno::ACCESS);
    }
    for name in ["other", "images", "images/neighbour", "other/secret", "images/link"] {
        for what in [READ, WRITE, REMOVE] {
            refused(&world.order(what, world.id(name), b""), Errno::ACCESS);
        }
    }
    for fields in [&b""[..], b"1", b"1\x00", b"\x001", b"x\x001", b"-1\x001", b"1\x001\x00more"] {
        for what in [READ, WRITE, REMOVE, SYNC, FORGET, LEAVE] {
            refused(&world.overlays.carry_out(what, fields).expect("an order"), Errno::INVAL);
        }
    }
    assert!(world.overlays.carry_out(b'?', b"").is_none());
    assert_eq!(world.all(), before);
    drop(made);
}

#[test]
fn what_has_taken_the_name_of_a_file_stays() {
    let mut world = World::new();
    file(world.make("new"));
    let id = world.id("images/new");
    fs::rename(world.path("other/secret"), world.path("images/new")).expect("rename");
    refused(&world.order(REMOVE, id, b""), Errno::NOENT);
    assert_eq!(fs::read(world.path("images/new")).expect("read"), b"theirs");
    // ext4 gives a number that is free to the next file; others may not.
    for round in 0..20 {
        let name = format!("round{round}");
        file(world.make(&name));
        let (id, path) =
            (world.id(&format!("images/{name}")), world.path(&format!("images/{name}")));
        fs::remove_file(&path).expect("remove");
        fs::write(&path, "theirs").expect("write");
        assert_ne!(world.id(&format!("images/{name}")), id, "the number is held");
        file(world.order(READ, id, b""));
        refused(&world.order(REMOVE, id, b""), Errno::NOENT);
        assert_eq!(fs::read(&path).expect("read"), b"theirs");
    }
}

#[test]
fn a_directory_that_was_replaced_before_the_start_is_none() {
    let root = tempfile::tempdir().expect("a directory");
    let path = root.path().join("images");
    fs::create_dir(&path).expect("mkdir");
    let told = named(path.clone()).expect("it is there");
    fs::rename(&path, root.path().join("moved")).expect("rename");
    fs::create_dir(&path).expect("mkdir");
    let mut overlays = Overlays::hold(std::slice::from_ref(&told), &[], None, "", &[]);
    let fields = format!("{}\0{}\0new", told.1.0, told.1.1);
    refused(&overlays.carry_out(MAKE, fields.as_bytes()).expect("an order"), Errno::ACCESS);
    let meta = fs::metadata(&path).expect("it is there");
    let id = (meta.dev(), meta.ino());
    let fields = format!("{}\0{}\0new", id.0, id.1);
    refused(&overlays.carry_out(MAKE, fields.as_bytes()).expect("an order"), Errno::ACCESS);
    // A file is none either.
    let secret = root.path().join("secret");
    fs::write(&secret, "theirs").expect("write");
    assert!(
        Overlays::hold(&[named(secret).expect("it is there")], &[], None, "", &[])
            .directories
            .is_empty()
    );
}

#[test]
fn a_directory_of_two_disks_is_left_when_both_have_ended() {
    let world = World::new();
    let told = named(world.path("images")).expect("it is there");
    let id = told.1;
    let mut world =
        World { overlays: Overlays::hold(&[told.clone(), told], &[], None, "", &[]), ..world };
    world.order(LEAVE, id, b"");
    file(world.make("one"));
    let made = world.id("images/one");
    world.order(LEAVE, id, b"");
    refused(&world.make("two"), Errno::ACCESS);
    file(world.order(READ, made, b""));
    world.order(FORGET, made, b"");
    refused(&world.order(READ, made, b""), Errno::ACCESS);
    assert!(world.overlays.files.is_empty() && world.overlays.directories.is_empty());
}

#[test]
fn there_is_an_end_to_it() {
    let mut world = World::new();
    for number in 0..HELD_MAX {
        file(world.make(&format!("{number}")));
    }
    refused(&world.make("more"), Errno::DQUOT);
    let first = world.id("images/0");
    world.order(FORGET, first, b"");
    file(world.make("more"));
    refused(&world.make("still more"), Errno::DQUOT);
    let first = world.id("images/1");
    world.order(FORGET, first, b"");
    world.overlays.count = MADE_MAX;
    refused(&world.make("still more"), Errno::DQUOT);
    assert!(!world.path("images/still more").exists());
}

#[test]
fn no_lock_of_a_file_stays_with_the_helper() {
    let mut world = World::new();
    let made = file(world.make("new"));
    rustix::fs::flock(&made, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("locked");
    let other = File::open(world.path("images/new")).expect("open");
    let lock = || rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    lock().expect_err("it is locked");
    drop(made);
    lock().expect("it is free");
}

#[test]
fn tasks_carry_these_orders_out() {
    let world = World::new();
    let told = named(world.path("images")).expect("it is there");
    let (dev, ino) = told.1;
    let tasks = Tasks { directories: vec![told], ..Tasks::default() };
    let held = tasks.hold();
    let order = format!("{}{dev}\0{ino}\0new", char::from(MAKE));
    assert_eq!(tasks.carry_out(order.as_bytes(), &held).kind, DONE);
    assert!(world.path("images/new").exists());
    assert_eq!(tasks.carry_out(order.as_bytes(), &held).kind, REFUSED);
}

#[test]
fn where_the_process_is_another_users_that_user_makes_and_owns_the_files() {
    if !ringdisk_testkit::limits::needs_root() {
        return;
    }
    let mut world = World::new();
    let told = named(world.path("images")).expect("it is there");
    world.overlays = Overlays::hold(&[told], &[], User::new(12345, 23456), "", &[]);
    // The directory is root's.
    let refused = world.make("new");
    assert_eq!(refused.kind, REFUSED);
    assert_eq!(refused.words, Errno::ACCESS.raw_os_error().to_string());
    assert!(!world.path("new").exists());
    for directory in [world.root.path().to_owned(), world.path("images")] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).expect("chmod");
    }
    let made = world.make("new");
    assert_eq!(made.kind, DONE);
    let meta = made.fd.map(File::from).expect("a file").metadata().expect("stat");
    assert_eq!((meta.uid(), meta.gid()), (12345, 23456));
}

/// The note of a file.
fn noted(world: &World, name: &str) -> String {
    let mut value = [0; 4096];
    let len = rustix::fs::getxattr(world.path(name), names_note::NAME, &mut value[..]);
    String::from_utf8(value[..len.expect("a note")].to_vec()).expect("text")
}

#[test]
fn an_image_is_noted_to_name_known_files_as_what_they_are() {
    let mut world = World::new();
    let images = ["disk(1) Büro", "base", "qcow2"].map(|name| {
        let path = world.path("images").join(name);
        fs::write(&path, "bytes").expect("write");
        let format = if name == "base" { Format::Raw } else { Format::Qcow2 };
        let (names, directory) = (String::from(";"), world.path("images"));
        Image { named: named(path).expect("it is there"), format, names, directory }
    });
    let directory = named(world.path("images")).expect("it is there");
    world.overlays = Overlays::hold(&[directory], &[], None, "", &images);
    file(world.make("over"));
    let id = world.id("images/over");
    assert_eq!(noted(&world, "images/over"), ";");
    let line = |name: &str, format| Names::new(Some(name.as_bytes()), Some(format), None).line();
    for (name, format) in [("disk(1) Büro", "qcow2"), ("./qcow2", "qcow2"), ("base", "raw")] {
        let line = line(name, format);
        assert_eq!(world.order(NOTE, id, line.as_bytes()).kind, DONE, "{name}");
        assert_eq!(noted(&world, "images/over"), line);
    }
    // The process may have written the header of an image into a raw one.
    for (name, format) in [("base", "qcow2"), ("base", ""), ("qcow2", "raw"), ("over", "raw")] {
        refused(&world.order(NOTE, id, line(name, format).as_bytes()), Errno::PERM);
    }
    // An open of this name leads to another file.
    file(world.make("file:neighbour"));
    refused(&world.order(NOTE, id, line("file:neighbour", "qcow2").as_bytes()), Errno::PERM);
    assert_eq!(noted(&world, "images/over"), line("base", "raw"));
}

#[test]
fn in_an_allowed_directory_files_are_made_at_any_depth_and_nowhere_else() {
    let mut world = World::new();
    let (tree, other) = (world.id("images"), world.id("other"));
    let told = named(world.path("images")).expect("it is there");
    let before = world.all();
    // The directory of a disk is one directory.
    refused(&world.order(MAKE, tree, b"below/new"), Errno::ACCESS);
    world.overlays = Overlays::hold(&[], &[told], None, "", &[]);
    symlink("below", world.path("images/inside")).expect("a link");
    for path in
        ["elsewhere/new", "../other/new", "below/../../other/new", "/new", "below/", "below/.."]
    {
        refused(&world.order(MAKE, tree, path.as_bytes()), Errno::ACCESS);
    }
    let secret = world.path("other").join("new").into_os_string().into_encoded_bytes();
    refused(&world.order(MAKE, tree, &secret), Errno::ACCESS);
    refused(&world.order(MAKE, other, b"new"), Errno::ACCESS);
    fs::remove_file(world.path("images/inside")).expect("remove");
    assert_eq!(world.all(), before);
    symlink("below", world.path("images/inside")).expect("a link");
    for (path, name) in [("new", "new"), ("below/one", "below/one"), ("inside/two", "below/two")] {
        file(world.order(MAKE, tree, path.as_bytes()));
        assert_eq!(noted(&world, &format!("images/{name}")), ";");
    }
    let id = world.id("images/below/two");
    assert_eq!(world.order(REMOVE, id, b"").kind, DONE);
    assert!(!world.path("images/below/two").exists());
    assert_eq!(world.order(LEAVE, tree, b"").kind, DONE);
    refused(&world.order(MAKE, tree, b"later"), Errno::ACCESS);
}

#[test]
fn a_file_that_a_note_names_keeps_its_name() {
    let mut world = World::new();
    file(world.make("over"));
    file(world.make("base"));
    let (over, base) = (world.id("images/over"), world.id("images/base"));
    assert_eq!(world.order(NOTE, over, b"base:qcow2;").kind, DONE);
    refused(&world.order(REMOVE, base, b""), Errno::BUSY);
    // Whatever becomes of the one that names it.
    assert_eq!(world.order(NOTE, over, b";").kind, DONE);
    assert_eq!(world.order(FORGET, over, b"").kind, DONE);
    refused(&world.order(REMOVE, base, b""), Errno::BUSY);
}

/// A directory of images, and another one with the target of a copy.
fn images_and_a_copy() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for name in ["images", "other"] {
        std::fs::create_dir(directory.path().join(name)).expect("mkdir");
    }
    std::fs::write(directory.path().join("other/copy"), "bytes").expect("write");
    directory
}

#[test]
fn the_target_of_a_mirror_is_opened_and_never_removed_and_its_directory_goes_with_it() {
    let directory = images_and_a_copy();
    let path = |name: &str| directory.path().join(name);
    let of = |name: &str| named(path(name)).expect("it is there").1;
    let (id, beside) = (of("other/copy"), of("other"));
    let told = named(path("images")).expect("it is there");
    let mut overlays = Overlays::hold(&[told], &[], None, "", &[]);
    assert_eq!(overlays.again(id, OFlags::RDWR).map(drop), Err(Errno::ACCESS));
    // The name leads to another file than the user has seen.
    assert_eq!(
        overlays.adopt(&path("other/copy"), of("images"), Format::Qcow2, Purpose::Top),
        Err(Errno::NOENT)
    );
    assert_eq!(
        overlays.adopt(&path("other/gone"), id, Format::Qcow2, Purpose::Top),
        Err(Errno::NOENT)
    );
    assert_eq!(overlays.make(beside, b"over").map(drop), Err(Errno::ACCESS));

    assert_eq!(overlays.adopt(&path("other/copy"), id, Format::Qcow2, Purpose::Top), Ok(()));
    assert_eq!(overlays.again(id, OFlags::RDWR).map(drop), Ok(()));
    assert_eq!(overlays.remove(id), Err(Errno::BUSY));
    assert_eq!(overlays.make(beside, b"over").map(drop), Ok(()));
    let over = of("other/over");
    for gone in [over, id] {
        let fields = format!("{}\0{}", gone.0, gone.1);
        overlays.carry_out(FORGET, fields.as_bytes()).expect("an answer");
    }
    assert_eq!(overlays.again(id, OFlags::RDWR).map(drop), Err(Errno::ACCESS));
    assert_eq!(overlays.make(beside, b"more").map(drop), Err(Errno::ACCESS));
    assert_eq!(std::fs::read(path("other/copy")).expect("it stays"), b"bytes");

    // A process that makes no overlays makes none there either.
    let mut strict = Overlays::default();
    assert_eq!(strict.adopt(&path("other/copy"), id, Format::Qcow2, Purpose::Top), Ok(()));
    assert_eq!(strict.make(beside, b"more").map(drop), Err(Errno::ACCESS));
}

#[test]
fn the_target_of_a_backup_is_opened_only_and_one_of_a_mirror_when_a_user_says_so() {
    let directory = images_and_a_copy();
    let path = |name: &str| directory.path().join(name);
    let of = |name: &str| named(path(name)).expect("it is there").1;
    let (id, beside) = (of("other/copy"), of("other"));
    let told = named(path("images")).expect("it is there");
    let mark = mark::new().expect("random bytes");
    let mut overlays = Overlays::hold(&[told], &[], None, &mark, &[]);
    let target = path("other/copy");
    assert_eq!(overlays.adopt(&target, id, Format::Qcow2, Purpose::Copy), Ok(()));
    assert_eq!(overlays.again(id, OFlags::RDWR).map(drop), Ok(()));
    assert_eq!(overlays.make(beside, b"over").map(drop), Err(Errno::ACCESS));
    assert_eq!(overlays.sync(beside), Err(Errno::ACCESS));
    assert_eq!(overlays.remove(id), Err(Errno::BUSY));
    assert!(!path("other/over").exists() && !mark::is_on(&target, &mark));
    // No image of the disk names it.
    overlays.make(of("images"), b"over").map(drop).expect("made");
    let line = Names::new(Some(b"../other/copy"), Some("qcow2"), None).line();
    assert!(overlays.note(of("images/over"), line.as_bytes(), true).is_err());

    assert_eq!(overlays.adopt(&target, id, Format::Qcow2, Purpose::Top), Ok(()));
    assert_eq!(overlays.adopt(&target, id, Format::Qcow2, Purpose::Copy), Ok(()));
    assert_eq!(overlays.files.iter().filter(|made| made.id == id).count(), 1);
    assert_eq!(overlays.make(beside, b"over").map(drop), Ok(()));
    if mark::is_kept(&target, &mark) {
        assert!(mark::is_on(&target, &mark));
    }
}
