//! An aligned request of a file, and a request to an NBD server, allocates nothing. A program of
//! its own, since it counts all allocations of the thread.

#![allow(clippy::unwrap_used)]

use futures_util::future::join3;
use ringdisk_ring::{Config, IoBuf, Runtime};
use ringdisk_storage::{OpenOptions, Storage};
use ringdisk_testkit::allocations::{Counting, of_this_thread};
use ringdisk_testkit::mount::scratch;

#[allow(dead_code)] // Tests of what it serves use the rest.
#[path = "nbd/server.rs"]
mod server;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations_of_requests(direct: bool) -> u64 {
    let directory = scratch();
    let path = directory.path().join("image");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let options = OpenOptions { direct, ..OpenOptions::default() };
    let storage = Storage::open(&path, &options).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(4096, 4096);
    runtime.block_on(async {
        let mut before = 0;
        for round in 0..300u64 {
            if round == 100 {
                before = of_this_thread();
            }
            let offset = round % 250 * 4096;
            assert_eq!(storage.read(&ring, offset, &buf).await, Ok(4096));
            assert_eq!(storage.write(&ring, offset, &buf).await, Ok(4096));
        }
        assert_eq!(storage.flush(&ring).await, Ok(()));
        of_this_thread() - before
    })
}

#[test]
fn aligned_requests_allocate_nothing() {
    assert_eq!(allocations_of_requests(false), 0, "buffered");
    assert_eq!(allocations_of_requests(true), 0, "direct");
}

#[test]
fn requests_to_an_nbd_server_allocate_nothing() {
    let server = server::Server::new(server::Offer::default());
    let storage = server.open();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let bufs = [4096, 4096, 64 << 10].map(|len| IoBuf::new(len, 4096));
    let allocated = runtime.block_on(async {
        let mut before = 0;
        for round in 0..300u64 {
            if round == 100 {
                before = of_this_thread();
            }
            let offset = round % 100 * 4096;
            let [small, other, large] = &bufs;
            let first = storage.read(&ring, offset, small);
            let second = storage.write(&ring, offset + (1 << 19), other);
            let all = join3(first, second, storage.write(&ring, 900_000, large)).await;
            assert_eq!(all, (Ok(4096), Ok(4096), Ok(64 << 10)));
            assert_eq!(storage.read(&ring, 900_000, large).await, Ok(64 << 10));
            assert_eq!(storage.flush(&ring).await, Ok(()));
        }
        of_this_thread() - before
    });
    assert_eq!(allocated, 0);
}
