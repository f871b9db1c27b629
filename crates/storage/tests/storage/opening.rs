//! What can be opened, how, and what the refusals say.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use ringdisk_storage::{Cause, Error, ErrorKind, Kind, Lock, OpenOptions, Storage};
use ringdisk_testkit::mount::scratch;
use rustix::fs::OFlags;

use crate::{DIRECT, block_on, image, open, read, write};

const READ_ONLY: OpenOptions = OpenOptions {
    no_flush: false,
    read_only: true,
    direct: false,
    lock: Lock::Auto,
    create: false,
    create_new: false,
    opener: None,
};

fn refusal(path: &Path, options: &OpenOptions) -> Error {
    Storage::open(path, options).map(drop).unwrap_err()
}

#[test]
fn facts_of_a_file() {
    let directory = scratch();
    let path = image(directory.path(), "image", 12_345);
    let storage = open(&path, &OpenOptions::default());
    let again = open(&path, &OpenOptions { lock: Lock::None, ..OpenOptions::default() });
    assert_eq!((storage.kind(), storage.len()), (Kind::Regular, 12_345));
    assert_eq!(storage.name(), path.to_str().unwrap());
    assert_eq!(storage.identity(), again.identity());
    assert!(storage.raw_fd().is_some() && !storage.is_read_only() && !storage.is_empty());
    assert!(storage.limits().optimal_transfer >= 4096);
}

#[test]
fn what_is_no_image_is_refused_in_words() {
    let directory = scratch();
    let path = |name| directory.path().join(name);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    std::os::unix::fs::symlink("nowhere", path("link")).unwrap();
    let cases: &[(&Path, ErrorKind, &str)] = &[
        (&path("absent"), ErrorKind::NotFound, "there is no such file"),
        (&path("link"), ErrorKind::NotFound, "symbolic link"),
        (Path::new(""), ErrorKind::NotFound, "empty name"),
        (directory.path(), ErrorKind::WrongType, "a directory"),
        (&path("pipe"), ErrorKind::WrongType, "a pipe"),
        (&path("socket"), ErrorKind::NotFound, "no file"),
        (Path::new("/dev/null"), ErrorKind::WrongType, "a character device"),
    ];
    for (path, kind, words) in cases {
        for options in [READ_ONLY, OpenOptions::default()] {
            let error = refusal(path, &options);
            assert_eq!(error.kind(), *kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
    let cause = |path: &Path| refusal(path, &READ_ONLY).cause().cloned();
    let absent = cause(&path("absent"));
    assert!(matches!(absent, Some(Cause::NotOpened { is_missing: true, .. })), "{absent:?}");
    let link = cause(&path("link"));
    assert!(matches!(link, Some(Cause::NotOpened { is_missing: false, .. })), "{link:?}");
    let is_directory = Cause::IsDirectory { file: directory.path().display().to_string() };
    assert_eq!(cause(directory.path()), Some(is_directory));
    assert_eq!(cause(&path("pipe")), None);
}

#[test]
fn contradictions_are_refused() {
    let directory = scratch();
    let path = image(directory.path(), "image", 0);
    let shared = OpenOptions { lock: Lock::ForceShare, ..OpenOptions::default() };
    assert_eq!(refusal(&path, &shared).kind(), ErrorKind::InvalidInput);
    let create = OpenOptions { create: true, ..READ_ONLY };
    assert_eq!(refusal(&path, &create).kind(), ErrorKind::InvalidInput);
}

#[test]
fn create_makes_a_file_once() {
    let directory = scratch();
    let path = directory.path().join("new");
    let create_new = OpenOptions { create_new: true, ..OpenOptions::default() };
    drop(open(&path, &create_new));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o111, 0);
    assert_eq!(refusal(&path, &create_new).kind(), ErrorKind::Exists);
    std::fs::write(&path, "kept").unwrap();
    let storage = open(&path, &OpenOptions { create: true, ..OpenOptions::default() });
    assert_eq!(storage.len(), 4);
}

#[test]
fn failed_creation_leaves_nothing_behind() {
    // A file system without O_DIRECT is hard to come by; a lock does not work on a new file. /proc
    // has no room for new files at all.
    let error =
        refusal(Path::new("/proc/new"), &OpenOptions { create: true, ..OpenOptions::default() });
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied));
}

#[test]
fn descriptor_in_the_wrong_mode_is_refused() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let from = |file: File, options: &OpenOptions| {
        Storage::from_fd(file.into(), "descriptor 5", options).map(drop).unwrap_err()
    };
    let error = from(File::open(&path).unwrap(), &OpenOptions::default());
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    assert!(error.to_string().contains("'descriptor 5'"), "{error}");
    let write_only = File::options().write(true).open(&path).unwrap();
    assert_eq!(from(write_only, &READ_ONLY).kind(), ErrorKind::InvalidInput);
    let flags = OFlags::PATH.bits().cast_signed();
    let path_only = File::options().read(true).custom_flags(flags).open(&path).unwrap();
    assert_eq!(from(path_only, &READ_ONLY).kind(), ErrorKind::InvalidInput);
}

#[test]
fn inherited_descriptor_works_whatever_its_flags() {
    let directory = scratch();
    let path = image(directory.path(), "image", 8192);
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).append(true).custom_flags(flags).open(&path).unwrap();
    let keeper: OwnedFd = file.as_fd().try_clone_to_owned().unwrap();
    let storage = Storage::from_fd(file.into(), "fd", &OpenOptions::default()).unwrap();
    block_on(|ring| async move {
        write(&ring, &storage, 0, &[1; 10]).await.unwrap();
        assert_eq!((storage.len(), storage.refresh_len()), (8192, Ok(8192)));
        assert_eq!(read(&ring, &storage, 0, 11).await.unwrap()[9..], [1, 0]);
    });
    let now = rustix::fs::fcntl_getfl(&keeper).unwrap();
    assert!(!now.intersects(OFlags::NONBLOCK | OFlags::APPEND));
}

#[test]
fn direct_descriptor_stays_direct() {
    let directory = scratch();
    let path = image(directory.path(), "image", 8192);
    let flags = OFlags::DIRECT.bits().cast_signed();
    let file = File::options().read(true).write(true).custom_flags(flags).open(&path).unwrap();
    let storage = Storage::from_fd(file.into(), "fd", &OpenOptions::default()).unwrap();
    assert!(storage.limits().direct && storage.limits().offset_align > 1);
    assert!(open(&path, &OpenOptions { lock: Lock::None, ..DIRECT }).limits().direct);
    block_on(|ring| async move {
        assert_eq!(write(&ring, &storage, 3, &[1; 10]).await, Ok(10));
        assert_eq!(read(&ring, &storage, 12, 2).await, Ok(vec![1, 0]));
    });
}

#[test]
fn direct_alignment_is_that_of_the_file() {
    let directory = scratch();
    let path = image(directory.path(), "image", 1 << 20);
    let limits = open(&path, &DIRECT).limits();
    let told = rustix::fs::statx(
        rustix::fs::CWD,
        &path,
        rustix::fs::AtFlags::empty(),
        rustix::fs::StatxFlags::DIOALIGN,
    )
    .unwrap();
    // 0 where the kernel does not tell; then it was found by trying.
    let expected = if told.stx_dio_offset_align == 0 {
        (limits.memory_align, limits.offset_align)
    } else {
        (told.stx_dio_mem_align, told.stx_dio_offset_align)
    };
    assert_eq!((limits.memory_align, limits.offset_align), expected);
    assert!(limits.direct);
}
