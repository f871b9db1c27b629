//! Any bytes as a frame of `/dev/fuse`, served by a file over a null disk: nothing panics, and
//! every reply is one that the kernel takes.

use std::cell::RefCell;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::abi::REQUEST_HEAD_BYTES;
use ringdisk_fuse::file::{FileOptions, FileServer};
use ringdisk_fuse::negotiate::{Profile, negotiate};
use ringdisk_fuse::reply::ReplyBuf;
use ringdisk_fuse::request::{Operation, Request};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};

/// Size of the disk, bytes; offsets of the frames lie on both sides of its end.
const DISK_BYTES: u64 = 1 << 20;
/// Bytes of data that a READ or WRITE may move.
const DATA_BYTES: usize = 4096;

struct Server {
    runtime: Runtime,
    ring: Ring,
    file: FileServer,
    data: IoBuf,
}

thread_local! {
    static SERVER: RefCell<Server> = RefCell::new(server());
}

fn server() -> Server {
    let runtime = Runtime::new(Config::default()).expect("io_uring is there");
    let ring = runtime.ring().clone();
    let size = Bytes(DISK_BYTES);
    let disk = Disk::null(&NullOptions { size, read_zeroes: true, ..NullOptions::default() });
    let options = FileOptions {
        growable: true,
        resizable: true,
        read_only: false,
        allow_other: true,
        backing_id: 0,
        profile: Profile::new(4096, None, false),
        uid: 0,
        gid: 0,
    };
    let file = FileServer::new(disk, &options);
    Server { runtime, ring, file, data: IoBuf::new(DATA_BYTES, 8) }
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    // The first byte chooses whether the length of the header is made right, so that most inputs
    // get past it.
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    let mut frame = bytes.to_vec();
    if choice % 8 != 0 && frame.len() >= 8 {
        let len = u32::try_from(frame.len()).expect("the fuzzer's inputs are short");
        frame[..4].copy_from_slice(&len.to_ne_bytes());
        // Opcodes are small; without this hardly any input would be one.
        frame[5..8].fill(0);
    }
    let head = &frame[..frame.len().min(REQUEST_HEAD_BYTES)];
    let request = match Request::parse(head, frame.len()) {
        Ok(request) => request,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    SERVER.with_borrow_mut(|server| serve(server, &request));
}

fn serve(server: &mut Server, request: &Request) {
    let Server { runtime, ring, file, data } = server;
    let unique = request.header.unique;
    let mut out = ReplyBuf::new();
    match &request.operation {
        Operation::Init(init) => {
            let _ = negotiate(init, file.profile());
            return;
        }
        Operation::Read(argument) => {
            let read = runtime.block_on(file.read(ring, argument.offset, argument.size, data));
            assert!(
                read.is_ok_and(|len| len <= data.len() && len as u64 <= u64::from(argument.size))
            );
            return;
        }
        Operation::Write(argument) => {
            let len = data.len().min(argument.size as usize);
            match runtime.block_on(file.write(ring, argument, &data.slice(0..len))) {
                Ok(written) => out.set_written(unique, written),
                Err(errno) => out.set_error(unique, errno),
            }
        }
        _ => runtime.block_on(file.serve_control(ring, request, &mut out)),
    }
    assert_eq!(out.is_empty(), !request.expects_reply());
    if !out.is_empty() {
        let reply = out.as_bytes();
        let stated = u32::from_ne_bytes(reply[..4].try_into().expect("four bytes"));
        assert_eq!(stated as usize, reply.len());
        assert_eq!(reply[8..16], unique.to_ne_bytes());
        assert!((0..512).contains(&out.error_number()));
    }
}
