//! The null disk.

use ringdisk_qcow2::Bytes;
use std::time::{Duration, Instant};

use ringdisk_ring::IoBuf;

use super::{buffer, run};
use crate::{Disk, Errno, Mapping, NullOptions};

const MIB: u64 = 1 << 20;

fn options(read_zeroes: bool) -> NullOptions {
    NullOptions { size: Bytes(MIB), read_zeroes, latency: Duration::ZERO }
}

#[test]
fn reads_leave_the_buffer_alone_or_zero_it() {
    run(async |ring| {
        for (read_zeroes, expected) in [(false, 7), (true, 0)] {
            let disk = Disk::null(&options(read_zeroes));
            let buf = buffer(&[7; 512]);
            assert_eq!(disk.read(&ring, 0, &buf).await, Ok(512));
            assert_eq!(buf.to_vec(), [expected; 512]);
        }
    });
}

#[test]
fn requests_are_cut_at_the_end() {
    run(async |ring| {
        let disk = Disk::null(&options(true));
        let buf = buffer(&[7; 512]);
        assert_eq!(disk.read(&ring, MIB - 100, &buf).await, Ok(100));
        assert_eq!(buf.to_vec()[99..101], [0, 7]);
        assert_eq!(disk.write(&ring, MIB - 100, &buf).await, Ok(100));
        for offset in [MIB, MIB + 1, u64::MAX] {
            assert_eq!(disk.read(&ring, offset, &buf).await, Ok(0));
            assert_eq!(disk.write(&ring, offset, &buf).await, Ok(0));
        }
    });
}

#[test]
fn what_a_null_disk_cannot_do_is_not_supported() {
    run(async |ring| {
        let disk = Disk::null(&options(false));
        assert_eq!(disk.discard(&ring, 0, Bytes(512)).await, Err(Errno::OPNOTSUPP));
        assert_eq!(disk.punch(&ring, 0, Bytes(512)).await, Err(Errno::OPNOTSUPP));
        assert_eq!(disk.resize(&ring, Bytes::ZERO).await, Err(Errno::OPNOTSUPP));
        assert_eq!(disk.grow(&ring, Bytes(2 * MIB)).await, Err(Errno::OPNOTSUPP));
        assert_eq!(disk.grow(&ring, Bytes(MIB)).await, Ok(()));
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(512), true).await, Ok(()));
        assert!(!disk.can_resize());
        assert!(!disk.is_read_only());
        assert_eq!(disk.allocated_bytes(), Bytes::ZERO);
    });
}

#[test]
fn the_largest_size_works() {
    run(async |ring| {
        let size = i64::MAX as u64;
        let disk = Disk::null(&NullOptions { size: Bytes(size), ..options(true) });
        assert_eq!(disk.read(&ring, size - 1, &IoBuf::new(4096, 4096)).await, Ok(1));
    });
}

#[test]
fn latency_is_waited_for_and_requests_overlap() {
    const REQUESTS: u32 = 64;
    run(async |ring| {
        let latency = Duration::from_millis(30);
        let disk = Disk::null(&NullOptions { latency, ..options(false) });
        let buf = IoBuf::new(4096, 4096);
        let before = Instant::now();
        disk.read(&ring, 0, &buf).await.expect("read");
        assert!(before.elapsed() >= latency);
        let before = Instant::now();
        let mut requests: Vec<_> =
            (0..REQUESTS).map(|_| Box::pin(disk.write(&ring, 0, &buf))).collect();
        std::future::poll_fn(|cx| {
            requests.retain_mut(|request| request.as_mut().poll(cx).is_pending());
            if requests.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        // One after the other they would take all of it; the half is room for a loaded machine.
        assert!(before.elapsed() < latency * REQUESTS / 2);
    });
}

#[test]
fn the_map_sends_readers_to_read() {
    run(async |ring| {
        let disk = Disk::null(&options(true));
        let view = disk.view().await;
        let mapping = view.map(&ring, 0, Bytes(MIB)).await.expect("map").mapping;
        assert!(matches!(mapping, Mapping::ReadOnly { len: Bytes(MIB) }));
        let mapping = view.map(&ring, MIB, Bytes(1)).await.expect("map").mapping;
        assert!(matches!(mapping, Mapping::PastEnd));
        drop(view);
        let status = disk.block_status(&ring, 0, Bytes(MIB)).await.expect("status");
        assert!(status.zero && status.len == Bytes(MIB));
    });
}
