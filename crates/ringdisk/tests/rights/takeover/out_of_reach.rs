//! What is none of a confined process's business.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::mounts;
use ringdisk_testkit::mount::{FileSystem, Mounted, scratch, text};
use ringdisk_testkit::process::ok_words;
use tempfile::TempDir;

use crate::common::{MIB, mount};

/// What a secret begins with.
pub(crate) const SECRET: &[u8] = b"of nobody's business\n";

/// Mounts, files and a socket of others.
pub(crate) struct Others {
    disk: Mounted,
    tmpfs: Option<FileSystem>,
    bound: PathBuf,
    listener: UnixListener,
    before: Vec<String>,
    _image: TempDir,
    directory: TempDir,
}

impl Others {
    pub(crate) fn new() -> Others {
        let (directory, image) = crate::common::raw_image(MIB, 9);
        let disk = mount(&["--format", "raw", text(&image)]);
        let place = scratch();
        let path = |name: &str| place.path().join(name);
        for name in ["memory", "bound"] {
            fs::create_dir(path(name)).expect("a directory");
        }
        let mut secret = SECRET.to_vec();
        secret.resize(64 << 10, b'.');
        fs::write(path("secret"), secret).expect("a file");
        fs::write(path("empty"), "").expect("a file");
        let tmpfs = FileSystem::tmpfs(&path("memory"), MIB);
        fs::write(path("memory/file"), "content").expect("a file");
        let bound = path("bound");
        ok_words(&["mount", "--bind", text(directory.path()), text(&bound)]);
        let listener = UnixListener::bind(path("socket")).expect("a socket");
        listener.set_nonblocking(true).expect("a setting");
        let mut others = Others {
            disk,
            tmpfs: Some(tmpfs),
            bound,
            listener,
            before: Vec::new(),
            _image: directory,
            directory: place,
        };
        others.before = others.now();
        others
    }

    /// Path of something of theirs.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The mountpoint of another disk.
    pub(crate) fn mountpoint(&self) -> PathBuf {
        self.disk.path().to_owned()
    }

    /// The number of its connection.
    pub(crate) fn connection(&self) -> u32 {
        number(self.disk.path())
    }

    fn now(&self) -> Vec<String> {
        let mut all: Vec<String> = mounts()
            .iter()
            .filter(|mount| {
                mount.path.starts_with(self.directory.path()) || mount.path == self.disk.path()
            })
            .map(|mount| format!("{} {}", mount.path.display(), mount.minor))
            .collect();
        for name in ["secret", "empty", "socket", "memory/file", "bound/disk.img"] {
            let meta = fs::symlink_metadata(self.path(name)).expect("it is there");
            let content = fs::read(self.path(name)).unwrap_or_default();
            let content = content
                .iter()
                .fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
            all.push(format!("{name} {} {:o} {} {content}", meta.ino(), meta.mode(), meta.len()));
        }
        all
    }

    /// All is as it was, and the other disk answers.
    #[track_caller]
    pub(crate) fn assert_same(&self) {
        assert_eq!(self.now(), self.before);
        assert_eq!(piece(self.disk.path(), 0, 4096), pattern(9, 0, 4096));
        assert!(self.listener.accept().is_err(), "somebody has connected");
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.bound, rustix::mount::UnmountFlags::DETACH);
        drop(self.tmpfs.take());
    }
}

/// The number of the connection of a mount.
pub(crate) fn number(path: &Path) -> u32 {
    ringdisk_testkit::limits::mount_at(path).expect("mounted").minor
}

/// A file's device and inode number.
pub(crate) fn identity(path: &Path) -> (u64, u64) {
    let meta = fs::symlink_metadata(path).expect("it is there");
    (meta.dev(), meta.ino())
}

/// A qcow2 of 1 MiB whose header names a file below it.
pub(crate) fn overlay_of(backing: &Path, at: &Path) -> Vec<u8> {
    let words = [
        "qemu-img",
        "create",
        "-qf",
        "qcow2",
        "-u",
        "-b",
        text(backing),
        "-F",
        "raw",
        text(at),
        "1M",
    ];
    ok_words(&words);
    let bytes = fs::read(at).expect("an image");
    fs::remove_file(at).expect("an image");
    bytes
}

/// The same with a data file.
pub(crate) fn with_data_file(data: &Path, at: &Path) -> Vec<u8> {
    let near = at.with_extension("data");
    let options = format!("data_file={},data_file_raw=on", text(&near));
    ok_words(&["qemu-img", "create", "-qf", "qcow2", "-o", &options, text(at), "1M"]);
    let mut bytes = fs::read(at).expect("an image");
    let (old, new) = (text(&near).as_bytes(), text(data).as_bytes());
    let place = bytes.windows(old.len()).position(|window| window == old).expect("named");
    // The length stands in the four bytes before it (header extension "data file name").
    let len = u32::try_from(new.len()).expect("short").to_be_bytes();
    bytes[place - 4..place].copy_from_slice(&len);
    bytes[place..place + old.len()].fill(0);
    bytes[place..place + new.len()].copy_from_slice(new);
    for path in [at, &near] {
        fs::remove_file(path).expect("an image");
    }
    bytes
}

/// An empty qcow2.
pub(crate) fn qcow2(at: &Path) {
    images::qcow2(at, "1M", "");
}
