//! The operations on a simulated storage, without a kernel: what no real mount can provoke.

use std::sync::Arc;

use ringdisk_disk::{Bytes, Cache, Disk, ImageOptions};
use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::{FileOptions, FileServer};
use crate::abi::flags::{FATTR_FH, FATTR_SIZE, WRITE_CACHE, WRITE_KILL_SUIDGID};
use crate::abi::{Attr, AttrOut, FallocateIn, InHeader, OpenIn, SetattrIn, WriteIn, opcode};
use crate::negotiate::Profile;
use crate::reply::ReplyBuf;
use crate::request::{Operation, Request};

const LEN: u64 = 64 << 10;

/// A file over a simulated storage, with the ring that drives it.
struct Fixture {
    runtime: Runtime,
    ring: Ring,
    storage: SimStorage,
    file: FileServer,
}

impl Fixture {
    fn new(change: impl FnOnce(&mut FileOptions), image: &ImageOptions) -> Fixture {
        let runtime = Runtime::new(Config::default()).expect("a ring");
        let ring = runtime.ring().clone();
        let storage = SimStorage::from_image(&[b'x'; 64 << 10], 1);
        let disk = Disk::from_storage(storage.storage(), image);
        let profile = Profile::new(4096, None, false);
        let mut options = FileOptions {
            growable: false,
            resizable: false,
            backing_id: 0,
            read_only: false,
            allow_other: true,
            profile,
            uid: 1,
            gid: 2,
        };
        change(&mut options);
        Fixture { runtime, ring, storage, file: FileServer::new(disk, &options) }
    }

    fn read(&mut self, offset: u64, size: u32, buf: &IoBuf) -> Result<usize, Errno> {
        self.runtime.block_on(self.file.read(&self.ring, offset, size, buf))
    }

    fn write(&mut self, argument: WriteIn, content: &[u8]) -> Result<usize, Errno> {
        let buf = IoBuf::new(content.len(), 8);
        buf.copy_from_slice(0, content);
        self.runtime.block_on(self.file.write(&self.ring, &argument, &buf))
    }

    fn serve(&mut self, number: u32, operation: Operation) -> ReplyBuf {
        let header = InHeader { opcode: number, unique: 5, ..InHeader::default() };
        let mut out = ReplyBuf::new();
        out.set_error(9, Errno::IO);
        let request = Request { header, operation };
        self.runtime.block_on(self.file.serve_control(&self.ring, &request, &mut out));
        out
    }

    fn attributes(&mut self) -> Attr {
        let out = self.serve(opcode::GETATTR, Operation::Getattr(crate::abi::GetattrIn::default()));
        let (body, _) = zerocopy::FromBytes::read_from_prefix(out.body()).expect("attributes");
        let body: AttrOut = body;
        body.attr
    }
}

fn plain() -> Fixture {
    Fixture::new(|_| {}, &ImageOptions::default())
}

#[test]
fn errors_of_the_storage_reach_the_client_as_they_are() {
    let mut fixture = plain();
    fixture.storage.on(When::kind(OpKind::Read), Fault::Fail(Errno::IO));
    fixture.storage.on(When::kind(OpKind::Write), Fault::Fail(Errno::NOSPC));
    fixture.storage.on(When::kind(OpKind::Flush), Fault::Fail(Errno::DQUOT));
    assert_eq!(fixture.read(0, 512, &IoBuf::new(512, 8)), Err(Errno::IO));
    assert_eq!(fixture.write(WriteIn::default(), &[1; 512]), Err(Errno::NOSPC));
    let out = fixture.serve(opcode::FSYNC, Operation::Fsync(crate::abi::FsyncIn::default()));
    assert_eq!(out.error_number(), Errno::DQUOT.raw_os_error());
}

#[test]
fn a_read_is_whole_although_the_storage_reads_in_pieces() {
    let mut fixture = plain();
    fixture.storage.on(When::kind(OpKind::Read).times(3), Fault::Short(1000));
    let buf = IoBuf::new(8192, 8);
    assert_eq!(fixture.read(0, 8192, &buf), Ok(8192));
    assert!(buf.to_vec() == vec![b'x'; 8192]);
}

#[test]
fn a_storage_that_lost_its_end_reads_as_zeroes() {
    let mut fixture = plain();
    fixture.storage.set_len_behind(1000);
    let buf = IoBuf::new(4096, 8);
    buf.fill(9);
    assert_eq!(fixture.read(0, 4096, &buf), Ok(4096));
    let expected = [vec![b'x'; 1000], vec![0; 3096]].concat();
    assert!(buf.to_vec() == expected);
}

#[test]
fn only_what_was_asked_for_is_read() {
    let mut fixture = plain();
    let buf = IoBuf::new(4096, 8);
    assert_eq!(fixture.read(LEN - 100, 50, &buf), Ok(50));
    assert_eq!(fixture.read(LEN - 100, 4096, &buf), Ok(100));
    assert_eq!(fixture.read(LEN, 4096, &buf), Ok(0));
    assert_eq!(fixture.read(u64::MAX - 5, 4096, &buf), Ok(0));
}

#[test]
fn a_write_that_fails_half_way_is_short_or_says_why_on_a_cached_mount() {
    for (kernel_cache, expected) in [(false, Ok(1000)), (true, Err(Errno::NOSPC))] {
        let change = |options: &mut FileOptions| options.profile.kernel_cache = kernel_cache;
        let mut fixture = Fixture::new(change, &ImageOptions::default());
        fixture.storage.on(When::kind(OpKind::Write).once(), Fault::Short(1000));
        fixture.storage.on(When::kind(OpKind::Write), Fault::Fail(Errno::NOSPC));
        let written = fixture.write(WriteIn::default(), &[1; 4096]);
        assert_eq!(written, expected);
    }
}

#[test]
fn pages_of_a_mapping_never_grow_the_disk() {
    let change = |options: &mut FileOptions| options.growable = true;
    let mut fixture = Fixture::new(change, &ImageOptions::default());
    let argument = WriteIn { offset: LEN - 100, write_flags: WRITE_CACHE, ..WriteIn::default() };
    assert_eq!(fixture.write(argument, &[1; 4096]), Ok(4096));
    assert_eq!(fixture.file.disk().size(), Bytes(LEN));
    let argument = WriteIn { offset: LEN - 100, ..WriteIn::default() };
    assert_eq!(fixture.write(argument, &[1; 4096]), Ok(4096));
    assert_eq!(fixture.file.disk().size(), Bytes(LEN - 100 + 4096));
}

#[test]
fn a_write_past_the_largest_file_is_too_big() {
    let change = |options: &mut FileOptions| options.growable = true;
    let mut fixture = Fixture::new(change, &ImageOptions::default());
    for offset in [u64::MAX, i64::MAX as u64, u64::MAX - 4095] {
        let argument = WriteIn { offset, ..WriteIn::default() };
        assert_eq!(fixture.write(argument, &[1; 4096]), Err(Errno::FBIG));
    }
}

#[test]
fn synchronous_writes_flush_once() {
    for (cache, dsync, expected) in [
        (Cache::Writeback, false, 0),
        (Cache::Writeback, true, 1),
        (Cache::Writethrough, true, 1),
        (Cache::Unsafe, true, 0),
    ] {
        let image = ImageOptions { cache, ..ImageOptions::default() };
        let mut fixture = Fixture::new(|_| {}, &image);
        let flags = if dsync { libc::O_DSYNC.unsigned_abs() } else { 0 };
        let argument = WriteIn { flags, ..WriteIn::default() };
        assert_eq!(fixture.write(argument, &[1; 512]), Ok(512));
        assert_eq!(fixture.storage.count(OpKind::Flush), expected, "{cache:?}");
    }
}

#[test]
fn a_flush_that_fails_fails_the_synchronous_write() {
    let mut fixture = plain();
    fixture.storage.on(When::kind(OpKind::Flush), Fault::Fail(Errno::IO));
    let argument = WriteIn { flags: libc::O_SYNC.unsigned_abs(), ..WriteIn::default() };
    assert_eq!(fixture.write(argument, &[1; 512]), Err(Errno::IO));
}

#[test]
fn a_read_only_file_answers_eacces_itself() {
    let change = |options: &mut FileOptions| options.read_only = true;
    let mut fixture = Fixture::new(change, &ImageOptions::default());
    let denied = Errno::ACCESS.raw_os_error();
    assert_eq!(fixture.write(WriteIn::default(), &[1; 512]), Err(Errno::ACCESS));
    let changes = [
        Operation::Open(OpenIn { flags: libc::O_RDWR.unsigned_abs(), open_flags: 0 }),
        Operation::Setattr(SetattrIn { valid: FATTR_SIZE, ..SetattrIn::default() }),
        Operation::Fallocate(FallocateIn { length: 1, ..FallocateIn::default() }),
    ];
    for operation in changes {
        assert_eq!(fixture.serve(opcode::OPEN, operation).error_number(), denied);
    }
    let operation = Operation::Open(OpenIn::default());
    assert_eq!(fixture.serve(opcode::OPEN, operation).error_number(), 0);
    let first = fixture.attributes();
    std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(fixture.attributes(), first, "nothing changes, not even the time");
}

#[test]
fn a_refused_change_of_attributes_changes_nothing() {
    let mut fixture = plain();
    let operation = Operation::Setattr(SetattrIn {
        valid: FATTR_SIZE | FATTR_FH | crate::abi::flags::FATTR_MODE,
        size: 1 << 63,
        mode: 0o777,
        ..SetattrIn::default()
    });
    let out = fixture.serve(opcode::SETATTR, operation);
    assert_eq!(out.error_number(), Errno::FBIG.raw_os_error());
    let attributes = fixture.attributes();
    assert_eq!((attributes.size, attributes.mode), (LEN, 0o100_600));
}

#[test]
fn a_write_of_another_user_clears_set_user_id() {
    let mut fixture = plain();
    let operation = Operation::Setattr(SetattrIn {
        valid: crate::abi::flags::FATTR_MODE,
        mode: 0o6755,
        ..SetattrIn::default()
    });
    assert_eq!(fixture.serve(opcode::SETATTR, operation).error_number(), 0);
    let argument = WriteIn { write_flags: WRITE_KILL_SUIDGID, ..WriteIn::default() };
    assert_eq!(fixture.write(argument, &[1; 512]), Ok(512));
    assert_eq!(fixture.attributes().mode, 0o100_755);
}

#[test]
fn an_empty_range_or_one_that_wraps_cannot_be_allocated() {
    let mut fixture = plain();
    for (offset, length, expected) in
        [(0, 0, Errno::INVAL), (u64::MAX, 2, Errno::FBIG), (1 << 62, 1 << 62, Errno::FBIG)]
    {
        let operation = Operation::Fallocate(FallocateIn { offset, length, ..Default::default() });
        let out = fixture.serve(opcode::FALLOCATE, operation);
        assert_eq!(out.error_number(), expected.raw_os_error());
    }
    assert_eq!(fixture.file.disk().size(), Bytes(LEN));
}

#[test]
fn open_files_are_counted() {
    let mut fixture = plain();
    for _ in 0..3 {
        fixture.serve(opcode::OPEN, Operation::Open(OpenIn::default()));
    }
    let release = Operation::Release(crate::abi::ReleaseIn::default());
    fixture.serve(opcode::RELEASE, release);
    assert_eq!(fixture.file.open_files(), 2);
    for _ in 0..3 {
        fixture.serve(opcode::RELEASE, release);
    }
    assert_eq!(fixture.file.open_files(), 0);
}

#[test]
fn what_is_opened_at_the_end_is_stale_and_not_counted() {
    let mut fixture = plain();
    let open = Operation::Open(OpenIn::default());
    for refuses in [true, false, true] {
        fixture.file.refuse_opens(refuses);
        let expected = if refuses { Errno::STALE.raw_os_error() } else { 0 };
        assert_eq!(fixture.serve(opcode::OPEN, open).error_number(), expected);
    }
    assert_eq!(fixture.file.open_files(), 1);
}

#[test]
fn requests_without_a_reply_get_none_and_unknown_ones_enosys() {
    let mut fixture = plain();
    let interrupt = Operation::Interrupt(crate::abi::InterruptIn { unique: 4 });
    assert!(fixture.serve(opcode::INTERRUPT, interrupt).is_empty());
    assert!(fixture.serve(opcode::NOTIFY_REPLY, Operation::NotifyReply).is_empty());
    let out = fixture.serve(opcode::IOCTL, Operation::Unsupported(opcode::IOCTL));
    assert_eq!(out.error_number(), Errno::NOSYS.raw_os_error());
    let out = fixture.serve(opcode::LOOKUP, Operation::Lookup);
    assert_eq!(out.error_number(), Errno::NOENT.raw_os_error());
}

#[test]
fn a_server_is_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Arc<FileServer>>();
}
