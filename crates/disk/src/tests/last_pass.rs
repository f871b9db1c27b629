//! What a commit does when its last pass, in which no request is in flight, finds no space.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::check_bytes;
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::commit_faults::{chain, images, storages};
use super::{assert_same, read_steps, run};
use crate::progress::Pause;
use crate::{CommitOptions, Disk, Errno, Error, OnError, Progress};

type Ended = Rc<RefCell<Option<Result<(), Error>>>>;

/// A commit of the top that runs beside its caller.
fn begin(ring: &Ring, disk: &Arc<Disk>, progress: &Arc<Progress>) -> Ended {
    let ended = Ended::default();
    let (disk, own, result) = (Arc::clone(disk), ring.clone(), Rc::clone(&ended));
    let progress = Arc::clone(progress);
    ring.spawn(async move {
        let done = disk.commit(&own, CommitOptions::TOP, &progress).await;
        *result.borrow_mut() = Some(done);
    });
    ended
}

async fn until(ring: &Ring, what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        ring.sleep(Duration::from_millis(1)).await;
    }
    panic!("{what}");
}

/// Has a commit of the top copy, and a client change what it has copied, so that the last pass
/// copies that again. Its writes of that fail.
///
/// Gives the disk, what it shows, and the commit, whose last pass may begin.
async fn fails_in_the_last_pass(
    ring: &Ring,
    base: &SimStorage,
    disk: &Arc<Disk>,
    progress: &Arc<Progress>,
    bytes: &mut [u8],
    errno: Errno,
) -> Ended {
    base.on(When::kind(OpKind::Write).once(), Fault::Hold);
    let ended = begin(ring, disk, progress);
    until(ring, "the commit writes", || !base.held().is_empty()).await;
    // It has read what it is about to write.
    let held = base.held()[0];
    let data = IoBuf::new(250_000, 512);
    data.fill(0x55);
    assert_eq!(disk.write(ring, 400_000, &data).await, Ok(data.len()));
    bytes[400_000..650_000].fill(0x55);
    let again = held.offset..held.offset + held.len;
    // Until rules are cleared: a qcow2 image that is full tries in more than one way.
    base.on(When::kind(OpKind::Write).at(again), Fault::Fail(errno));
    base.release(held.number);
    ended
}

#[test]
fn a_commit_whose_last_pass_finds_no_space_waits_beside_its_clients() {
    let (images, mut bytes) = images();
    run(async |ring| {
        let storages = storages(&images, 7);
        let base = &storages["mid.qcow2"];
        let disk = chain(&ring, &storages, "top.qcow2", true).await;
        let progress = Arc::new(Progress::new());
        progress.set_on_error(OnError::StopWhenFull);
        let ended =
            fails_in_the_last_pass(&ring, base, &disk, &progress, &mut bytes, Errno::NOSPC).await;
        until(&ring, "it waits", || matches!(progress.paused(), Some(Pause::Full(_)))).await;
        // Clients do not.
        let data = IoBuf::new(100_000, 512);
        data.fill(0x66);
        let written = ring.within(Duration::from_secs(1), disk.write(&ring, 500_000, &data)).await;
        assert_eq!(written, Ok(Ok(data.len())));
        bytes[500_000..600_000].fill(0x66);
        assert!(ended.borrow().is_none());
        base.clear_rules();
        // It tries at once.
        progress.resume();
        until(&ring, "it ends", || ended.borrow().is_some()).await;
        ended.take().expect("ended").expect("the commit");
        assert_eq!(progress.paused(), None);
        assert_eq!((disk.layers().len(), progress.done()), (2, progress.total()));
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
        let report = check_bytes(base.image().as_slice()).expect("the base can be checked");
        assert_eq!(report.corruptions, 0, "{:?}", report.messages);
    });
}

#[test]
fn a_commit_whose_last_pass_fails_ends_or_is_cancelled_and_the_chain_is_as_it_was() {
    for (on_error, errno) in [(OnError::Report, Errno::IO), (OnError::StopWhenFull, Errno::NOSPC)] {
        let (images, mut bytes) = images();
        run(async |ring| {
            let storages = storages(&images, 7);
            let base = &storages["mid.qcow2"];
            let disk = chain(&ring, &storages, "top.qcow2", true).await;
            let progress = Arc::new(Progress::new());
            progress.set_on_error(on_error);
            let ended =
                fails_in_the_last_pass(&ring, base, &disk, &progress, &mut bytes, errno).await;
            if on_error == OnError::StopWhenFull {
                let waits = || matches!(progress.paused(), Some(Pause::Full(_)));
                until(&ring, "it waits", waits).await;
                progress.cancel();
            }
            until(&ring, "it ends", || ended.borrow().is_some()).await;
            ended.take().expect("ended").expect_err("it fails");
            assert_eq!(disk.layers().len(), 3);
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            // Once more, with nothing in the way.
            base.clear_rules();
            let progress = Arc::new(Progress::new());
            disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("the commit");
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}
