//! Repeats operations that failed for a passing reason.
//!
//! Promises: clients of a file see neither `EINTR` nor (for about 10 s) `EAGAIN`. io_uring
//! completes an operation with `EAGAIN` where it could not wait for a resource that is short for
//! the moment (memory, a request of the block layer), and with `EINTR` where a signal or the end of
//! a worker interrupted it. Ring threads.

use std::time::Duration;

use ringdisk_ring::{Errno, Op, Ring};

/// First and longest pause after an `EAGAIN`.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Attempts after an `EAGAIN`: with these pauses about 10 s. An error that lasts longer is passed
/// on to the caller.
const AGAIN_MAX: u32 = 110;

/// Whether an error is a passing one: the same operation may succeed a moment later.
pub(crate) fn is_passing(errno: Errno) -> bool {
    matches!(errno, Errno::INTR | Errno::AGAIN)
}

/// Attempts at one operation.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    again: u32,
}

impl Retry {
    /// Whether to try again after this error. Waits first where that helps.
    pub(crate) async fn after(&mut self, ring: &Ring, errno: Errno) -> bool {
        match errno {
            Errno::INTR => true,
            Errno::AGAIN if self.again < AGAIN_MAX => {
                let pause = PAUSE_MIN * 2u32.saturating_pow(self.again.min(16));
                self.again += 1;
                ring.sleep(pause.min(PAUSE_MAX)).await;
                true
            }
            _ => false,
        }
    }
}

/// An operation of a file. Tests let it fail ([`tests::Faults`]).
#[cfg(not(test))]
#[inline]
pub(crate) fn once(operation: Op) -> Op {
    operation
}

#[cfg(test)]
pub(crate) async fn once(operation: Op) -> Result<u32, Errno> {
    match tests::next() {
        None => operation.await,
        Some(tests::Fault::Fail(errno)) => Err(errno),
        // More bytes may have moved than are reported.
        Some(tests::Fault::Short(most)) => operation.await.map(|moved| moved.min(most)),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::fs;
    use std::path::{Path, PathBuf};

    use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
    use rustix::fs::FallocateFlags;
    use tempfile::TempDir;

    use super::{AGAIN_MAX, Retry, is_passing};
    use crate::file::File;
    use crate::{OpenOptions, open};

    /// What happens to one operation.
    #[derive(Clone, Copy, Debug)]
    pub(super) enum Fault {
        /// It fails without having been made.
        Fail(Errno),
        /// So many bytes at most are moved.
        Short(u32),
    }

    use Fault::{Fail, Short};

    thread_local! {
        static FAULTS: RefCell<VecDeque<Fault>> = const { RefCell::new(VecDeque::new()) };
    }

    pub(super) fn next() -> Option<Fault> {
        FAULTS.with_borrow_mut(VecDeque::pop_front)
    }

    /// The next operations of this thread meet these, in this order.
    fn inject(faults: &[Fault]) {
        FAULTS.with_borrow_mut(|all| all.extend(faults));
    }

    fn left() -> usize {
        FAULTS.with_borrow(VecDeque::len)
    }

    const AGAIN: Fault = Fail(Errno::AGAIN);
    const LEN: usize = 64 << 10;

    /// A file of numbers, past the page cache or not, and a ring.
    fn scene(direct: bool) -> (TempDir, PathBuf, File, Runtime, Ring) {
        let directory = tempfile::tempdir_in("/var/tmp").expect("directory");
        let path = directory.path().join("image");
        fs::write(&path, content()).expect("write");
        let options = OpenOptions { direct, ..OpenOptions::default() };
        let file = open::open(&path, &options).expect("open");
        let runtime = Runtime::new(Config::default()).expect("a ring");
        let ring = runtime.ring().clone();
        (directory, path, file, runtime, ring)
    }

    fn content() -> Vec<u8> {
        (0..=250).cycle().flat_map(|byte| [byte; 7]).take(LEN).collect()
    }

    fn read(path: &Path) -> Vec<u8> {
        fs::read(path).expect("read")
    }

    #[test]
    fn reads_and_writes_go_on_wherever_the_moment_was_a_bad_one() {
        let at_first = [AGAIN, Fail(Errno::INTR), AGAIN];
        let after_a_part = [Short(4096), AGAIN, Fail(Errno::INTR), Short(4096), AGAIN];
        let both = [AGAIN, Short(8192), AGAIN];
        // A request that suits, and one that is cut into pieces with O_DIRECT.
        for (direct, offset, len) in [(false, 4096, 16384), (true, 4096, 16384), (true, 700, 20000)]
        {
            for faults in [&at_first[..], &after_a_part, &both] {
                let what = format!("direct {direct}, {len} bytes at {offset}, {faults:?}");
                let (_directory, path, file, mut runtime, ring) = scene(direct);
                let buf = IoBuf::new(len, 4096);
                runtime.block_on(async {
                    inject(faults);
                    assert_eq!(file.read(&ring, offset, &buf).await, Ok(len), "{what}");
                    assert_eq!(left(), 0, "{what}");
                    let start = usize::try_from(offset).expect("small");
                    assert!(buf.to_vec() == content()[start..start + len], "{what}");
                    buf.fill(0xcc);
                    inject(faults);
                    assert_eq!(file.write(&ring, offset, &buf).await, Ok(len), "{what}");
                    assert_eq!(left(), 0, "{what}");
                    let mut expected = content();
                    expected[start..start + len].fill(0xcc);
                    assert!(read(&path) == expected, "{what}");
                });
            }
        }
    }

    #[test]
    fn flushes_holes_and_lengths_are_tried_again() {
        let (_directory, path, file, mut runtime, ring) = scene(false);
        let faults = [AGAIN, Fail(Errno::INTR), AGAIN];
        runtime.block_on(async {
            inject(&faults);
            assert_eq!(file.flush(&ring).await, Ok(()));
            assert_eq!(left(), 0);
            assert_eq!(file.flush(&ring).await, Ok(()), "it is no failed flush");
            inject(&faults);
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            assert_eq!(file.fallocate(&ring, punch, 4096, 4096).await, Ok(()));
            assert_eq!(left(), 0);
            let mut expected = content();
            expected[4096..8192].fill(0);
            assert!(read(&path) == expected);
            for len in [LEN as u64 / 2, LEN as u64 + 5] {
                inject(&faults);
                assert_eq!(file.set_len(&ring, len).await, Ok(()));
                assert_eq!((left(), file.len()), (0, len));
            }
            expected.truncate(LEN / 2);
            expected.resize(LEN + 5, 0);
            assert!(read(&path) == expected);
        });
    }

    #[test]
    fn errors_that_say_something_are_told_at_once() {
        let (_directory, path, file, mut runtime, ring) = scene(false);
        let buf = IoBuf::new(4096, 4096);
        runtime.block_on(async {
            let fail = || inject(&[AGAIN, Fail(Errno::IO)]);
            fail();
            assert_eq!(file.read(&ring, 0, &buf).await, Err(Errno::IO));
            fail();
            assert_eq!(file.write(&ring, 0, &buf).await, Err(Errno::IO));
            fail();
            assert_eq!(
                file.fallocate(&ring, FallocateFlags::empty(), 0, 4096).await,
                Err(Errno::IO)
            );
            fail();
            assert_eq!(file.set_len(&ring, 5).await, Err(Errno::IO));
            fail();
            assert_eq!(file.flush(&ring).await, Err(Errno::IO));
            assert_eq!((left(), file.len()), (0, LEN as u64));
            assert_eq!(file.flush(&ring).await, Err(Errno::IO), "and remembered");
        });
        assert!(read(&path) == content());
    }

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_told() {
        let mut runtime = Runtime::new(Config::default()).expect("a ring");
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            let mut retry = Retry::default();
            for errno in [Errno::AGAIN, Errno::INTR, Errno::AGAIN, Errno::AGAIN] {
                assert!(is_passing(errno) && retry.after(&ring, errno).await, "{errno}");
            }
            assert_eq!(retry.again, 3);
            for errno in [Errno::IO, Errno::NOSPC, Errno::INVAL, Errno::CANCELED] {
                assert!(!is_passing(errno) && !retry.after(&ring, errno).await, "{errno}");
            }
            // It does not go on for ever.
            let mut last = Retry { again: AGAIN_MAX - 1 };
            assert!(last.after(&ring, Errno::AGAIN).await);
            assert!(!last.after(&ring, Errno::AGAIN).await);
        });
    }
}
