//! A disk that goes from one process to another: this program starts itself again as the new
//! process, and once more as one that tries all the time to get the image.

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{
    Bytes, Cache, Disk, Errno, ErrorKind, Format, HandOver, ImageOptions, NullOptions, Source,
};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_storage::{Lock, OpenOptions, Storage};
use ringdisk_testkit::process::{LIMIT, command, ok, until};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// What a started copy of this program does; its test `role` does nothing without it.
const ROLE: &str = "RINGDISK_UPGRADE_ROLE";
const IMAGE: &str = "RINGDISK_UPGRADE_IMAGE";
const SIZE: u64 = 4 << 20;

fn block_on<F: Future>(test: impl FnOnce(Ring) -> F) -> F::Output {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

async fn write(ring: &Ring, disk: &Disk, offset: u64, len: usize, value: u8) {
    let buf = IoBuf::new(len, 4096);
    buf.fill(value);
    assert_eq!(disk.write(ring, offset, &buf).await, Ok(len));
}

async fn holds(ring: &Ring, disk: &Disk, offset: u64, len: usize, value: u8) {
    let buf = IoBuf::new(len, 4096);
    assert_eq!(disk.read(ring, offset, &buf).await, Ok(len));
    assert!(buf.to_vec().iter().all(|byte| *byte == value), "not {value} at {offset}");
}

fn send(socket: &UnixStream, handed: &HandOver) {
    let fds: Vec<_> = handed.fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let len = u32::try_from(handed.description.len()).expect("a short text").to_le_bytes();
    let pieces = [IoSlice::new(&len), IoSlice::new(handed.description.as_bytes())];
    sendmsg(socket, &pieces, &mut control, SendFlags::NOSIGNAL).expect("sendmsg");
}

fn receive(mut socket: &UnixStream) -> HandOver {
    let mut len = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut len)];
    recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).expect("recvmsg");
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let mut text = vec![0; u32::from_le_bytes(len) as usize];
    socket.read_exact(&mut text).expect("the description");
    HandOver { description: String::from_utf8(text).expect("text"), fds }
}

fn start(role: &str, image: &Path, stdin: Stdio) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "role", "--ignored", "--nocapture"])
        .env(ROLE, role)
        .env(IMAGE, image)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child")
}

/// What the started copies do.
#[test]
#[ignore = "run by the others: becomes a process of theirs"]
fn role() {
    let role = std::env::var(ROLE).expect("a role, from the test that starts it");
    let image = PathBuf::from(std::env::var_os(IMAGE).expect("an image"));
    // Descriptor 0 is the socket, or a pipe that ends with the test.
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a duplicate");
    match role.as_str() {
        "probes" => probes(&image),
        "goes on" => goes_on(&UnixStream::from(stdin)),
        "fails" => {
            let handed = receive(&UnixStream::from(stdin));
            let error = block_on(async |ring| {
                let damaged = HandOver { description: "{}".to_owned(), ..handed };
                Disk::open_handed(&ring, damaged, &ImageOptions::default()).await.map(drop)
            });
            assert_eq!(error.expect_err("damaged").kind(), ErrorKind::Invalid);
        }
        other => panic!("{other}"),
    }
}

/// Tries to lock the image until it is killed, and says when it could.
fn probes(image: &Path) {
    println!("\nready");
    loop {
        let options = OpenOptions { lock: Lock::Exclusive, ..OpenOptions::default() };
        // Not by an open: its message costs time when it is refused.
        let unlocked = OpenOptions { lock: Lock::None, ..options };
        let storage = Storage::open(image, &unlocked).expect("open");
        for _ in 0..1000 {
            if storage.may_lock(Lock::Exclusive) {
                println!("\nfree");
                return;
            }
        }
    }
}

/// The new process.
fn goes_on(mut socket: &UnixStream) {
    let handed = receive(socket);
    block_on(async |ring| {
        let options =
            ImageOptions { temporary: handed.description.contains("temporary"), ..options() };
        let disk = Disk::open_handed(&ring, handed, &options).await.expect("open");
        assert!(disk.is_active());
        assert_eq!(disk.size(), Bytes(SIZE));
        holds(&ring, &disk, 1 << 20, 70_000, 2).await;
        write(&ring, &disk, 1 << 20, 4096, 3).await;
        write(&ring, &disk, 2 << 20, 70_000, 4).await;
        disk.flush(&ring).await.expect("flush");
        socket.write_all(b"o").expect("an answer");
        // The old one has ended when this comes.
        let mut word = [0];
        socket.read_exact(&mut word).expect("a word");
        disk.take_charge();
        holds(&ring, &disk, 2 << 20, 70_000, 4).await;
        write(&ring, &disk, 3 << 20, 4096, 5).await;
        socket.write_all(b"k").expect("an answer");
        socket.read_exact(&mut word).expect("a word");
        disk.close(&ring).await.expect("close");
    });
}

fn options() -> ImageOptions {
    ImageOptions::default()
}

/// Kills what is left of a child.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that tries to get the image all the time.
struct Prober {
    child: Guard,
    is_free: Arc<AtomicBool>,
}

impl Prober {
    fn new(image: &Path) -> Prober {
        let mut child = Guard(start("probes", image, Stdio::null()));
        let (ready, is_free) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let lines = BufReader::new(child.0.stdout.take().expect("a pipe")).lines();
        let (says_ready, says_free) = (Arc::clone(&ready), Arc::clone(&is_free));
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                match line.as_str() {
                    "ready" => says_ready.store(true, Ordering::SeqCst),
                    "free" => says_free.store(true, Ordering::SeqCst),
                    _ => {}
                }
            }
        });
        until(LIMIT, || ready.load(Ordering::SeqCst).then_some(())).expect("a prober");
        Prober { child, is_free }
    }

    fn is_free(&self) -> bool {
        self.is_free.load(Ordering::SeqCst)
    }
}

/// Images of all kinds in one directory: names of the top one, with options.
fn images(directory: &Path) -> Vec<(&'static str, ImageOptions)> {
    let make = |words: &[&str]| {
        let mut qemu = command(&["qemu-img", "create", "-q"]);
        ok(qemu.args(words).current_dir(directory));
    };
    make(&["-f", "raw", "a.raw", "4M"]);
    make(&["-f", "qcow2", "-o", "lazy_refcounts=on", "a.qcow2", "4M"]);
    make(&["-f", "qcow2", "-o", "data_file=data.bin", "outside.qcow2", "4M"]);
    make(&["-f", "qcow2", "base.qcow2", "4M"]);
    make(&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "over.qcow2"]);
    make(&["-f", "raw", "below.raw", "4M"]);
    let raw = ImageOptions { format: Some(Format::Raw), ..options() };
    let direct = ImageOptions { cache: Cache::None, ..options() };
    vec![
        ("a.raw", raw),
        ("a.qcow2", options()),
        ("outside.qcow2", direct),
        ("over.qcow2", options()),
        ("below.raw", ImageOptions { temporary: true, ..options() }),
    ]
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory")
}

async fn open(ring: &Ring, path: &Path, options: &ImageOptions) -> Arc<Disk> {
    // A child of another test has copies of all descriptors between its fork and its exec.
    let options = ImageOptions { wait_for_locks: Some(LIMIT), ..options.clone() };
    Disk::open(ring, Source::Path(path.to_owned()), &options).await.expect("open")
}

#[test]
fn a_disk_goes_to_another_process_and_its_lock_is_free_at_no_moment() {
    let directory = scratch();
    for (name, options) in images(directory.path()) {
        eprintln!("{name}");
        let path = directory.path().join(name);
        let mut prober = None;
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_read_timeout(Some(LIMIT)).expect("a limit");
        let mut child = Guard(start("goes on", &path, Stdio::from(OwnedFd::from(theirs))));
        block_on(async |ring| {
            let disk = open(&ring, &path, &options).await;
            // A reader of the base shares it, so a temporary overlay keeps writers out only; that
            // is what is asked for.
            prober = Some(Prober::new(&path));
            write(&ring, &disk, 1 << 20, 70_000, 2).await;
            let handed = disk.hand_over(&ring).await.expect("hand over");
            assert!(!disk.is_active());
            assert_eq!(disk.read(&ring, 0, &IoBuf::new(512, 512)).await, Err(Errno::BUSY));
            let error = disk.deactivate(&ring).await.expect_err("it is away");
            let temporary = options.temporary && error.kind() == ErrorKind::Unsupported;
            assert!(temporary || error.kind() == ErrorKind::Busy, "{error}");
            let error = disk.activate(&ring, LIMIT).await.expect_err("it is away");
            assert_eq!(error.kind(), ErrorKind::Busy);
            send(&ours, &handed);
            drop(handed);
            let mut word = [0];
            ours.read_exact(&mut word).expect("the new process goes on");
            disk.close(&ring).await.expect("nothing is left to do");
            drop(disk);
        });
        // With the ring every reference of ours is gone.
        let prober = prober.expect("a prober");
        ours.write_all(b"y").expect("a word");
        let mut word = [0];
        ours.read_exact(&mut word).expect("the new process goes on");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!prober.is_free(), "{name}: somebody else could have taken the image");
        ours.write_all(b"e").expect("a word");
        let ended = until(LIMIT, || child.0.try_wait().expect("a child"));
        assert!(ended.expect("it ends").success(), "{name}");
        until(LIMIT, || prober.is_free().then_some(())).expect("it is free now");
        drop(prober.child);
        if !options.temporary {
            block_on(async |ring| {
                let disk = open(&ring, &path, &options).await;
                holds(&ring, &disk, 1 << 20, 4096, 3).await;
                holds(&ring, &disk, (1 << 20) + 4096, 60_000, 2).await;
                holds(&ring, &disk, 2 << 20, 70_000, 4).await;
                holds(&ring, &disk, 3 << 20, 4096, 5).await;
                disk.close(&ring).await.expect("close");
            });
        }
        if name.ends_with("qcow2") {
            // It looks for a data file where it is started.
            let mut check = command(&["qemu-img", "check", "-q", name]);
            ok(check.current_dir(directory.path()));
        }
    }
}

#[test]
fn the_old_process_goes_on_when_the_new_one_fails() {
    let directory = scratch();
    for (name, options) in images(directory.path()) {
        let path = directory.path().join(name);
        block_on(async |ring| {
            let disk = open(&ring, &path, &options).await;
            let prober = Prober::new(&path);
            write(&ring, &disk, 1 << 20, 70_000, 2).await;
            for _ in 0..2 {
                let (ours, theirs) = UnixStream::pair().expect("a pair");
                let stdin = Stdio::from(OwnedFd::from(theirs));
                let mut child = Guard(start("fails", &path, stdin));
                send(&ours, &disk.hand_over(&ring).await.expect("hand over"));
                let ended = until(LIMIT, || child.0.try_wait().expect("a child"));
                assert!(ended.expect("it ends").success());
                disk.resume(&ring).await.expect("resume");
                disk.resume(&ring).await.expect("nothing to do");
                holds(&ring, &disk, 1 << 20, 70_000, 2).await;
                write(&ring, &disk, 2 << 20, 70_000, 3).await;
            }
            assert!(!prober.is_free(), "{name}");
            disk.close(&ring).await.expect("close");
            drop(disk);
            until(LIMIT, || prober.is_free().then_some(())).expect("it is free now");
        });
    }
}

#[test]
fn a_failure_of_the_new_process_takes_no_lock_away() {
    let directory = scratch();
    let path = directory.path().join("a.qcow2");
    images(directory.path());
    block_on(async |ring| {
        let disk = open(&ring, &path, &options()).await;
        let may_lock = || {
            let unlocked = OpenOptions { lock: Lock::None, ..OpenOptions::default() };
            Storage::open(&path, &unlocked).expect("open").may_lock(Lock::Auto)
        };
        let again = async |change: &dyn Fn(&mut HandOver)| {
            let mut handed = disk.hand_over(&ring).await.expect("hand over");
            change(&mut handed);
            let opened = Disk::open_handed(&ring, handed, &options()).await;
            let result = opened.map(drop);
            disk.resume(&ring).await.expect("resume");
            assert!(!may_lock());
            result
        };
        again(&|_| ()).await.expect("it is right");
        let few = again(&|handed| drop(handed.fds.pop())).await.expect_err("too few");
        assert!(few.message().contains("has 1 files, and 0 came"), "{few}");
        let elsewhere = |handed: &mut HandOver| {
            handed.fds[0] = std::fs::File::open(directory.path().join("a.raw")).expect("a").into();
        };
        again(&elsewhere).await.expect_err("another file");
        let text = again(&|handed| handed.description.push('x')).await.expect_err("damaged");
        assert_eq!(text.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn what_has_become_of_the_names_does_not_matter() {
    let directory = scratch();
    images(directory.path());
    let path = directory.path().join("over.qcow2");
    block_on(async |ring| {
        let disk = open(&ring, &path, &options()).await;
        write(&ring, &disk, 0, 4096, 1).await;
        let handed = disk.hand_over(&ring).await.expect("hand over");
        std::fs::rename(&path, directory.path().join("elsewhere")).expect("rename");
        std::fs::remove_file(directory.path().join("base.qcow2")).expect("remove");
        let new = Disk::open_handed(&ring, handed, &options()).await.expect("open");
        drop(disk);
        new.take_charge();
        assert_eq!(new.layers().len(), 2);
        assert_eq!(new.layers()[0].name(), path);
        holds(&ring, &new, 0, 4096, 1).await;
        write(&ring, &new, 1 << 20, 4096, 2).await;
        // It is a disk as any other: it can move on.
        let handed = new.hand_over(&ring).await.expect("hand over");
        let newer = Disk::open_handed(&ring, handed, &options()).await.expect("open");
        newer.take_charge();
        drop(new);
        newer.deactivate(&ring).await.expect("deactivate");
        newer.activate(&ring, LIMIT).await.expect("activate");
        holds(&ring, &newer, 1 << 20, 4096, 2).await;
    });
}

#[test]
fn a_disk_that_waits_for_its_guest_and_a_null_disk_can_be_handed_over() {
    let directory = scratch();
    images(directory.path());
    let path = directory.path().join("over.qcow2");
    block_on(async |ring| {
        let incoming = ImageOptions { inactive: true, ..options() };
        let source = open(&ring, &path, &options()).await;
        let disk = open(&ring, &path, &incoming).await;
        let handed = disk.hand_over(&ring).await.expect("hand over");
        let new = Disk::open_handed(&ring, handed, &options()).await.expect("open");
        drop(disk);
        assert!(!new.is_active());
        write(&ring, &source, 0, 4096, 1).await;
        source.deactivate(&ring).await.expect("deactivate");
        new.activate(&ring, LIMIT).await.expect("activate");
        holds(&ring, &new, 0, 4096, 1).await;

        let null = NullOptions { size: Bytes(12_345), read_zeroes: true, latency: Duration::ZERO };
        let handed = Disk::null(&null).hand_over(&ring).await.expect("hand over");
        assert!(handed.fds.is_empty());
        let new = Disk::open_handed(&ring, handed, &options()).await.expect("open");
        assert_eq!(new.size(), Bytes(12_345));
        holds(&ring, &new, 0, 4096, 0).await;
    });
}
