//! A served disk whose storage is an export of a server that falls silent: in the handshake, in the
//! middle of a reply, and when the client leaves. The other disk of the same process, on the same
//! queue thread, is served as ever, and a stop ends the process within its limits.

use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{Finished, LIMIT, patient, until};
use rustix::process::Signal;

use crate::common::BLOCK;
use crate::common::nbd_client::{FLUSH, NbdClient, READ, WRITE};
use crate::common::nbd_storage::{NbdStorage, Silence};
use crate::common::serving::{Daemon, Place, ctl, serve_command};

/// How long the server has to come back (`--reconnect`).
const RECONNECT: Duration = Duration::from_secs(1);
/// Connecting and the handshake take so long at most (docs/nbd-client.md).
const CONNECTING: Duration = Duration::from_secs(10);
/// At a stop, requests in flight have 10 s, and so has the last flush (docs/nbd.md).
const STOP: Duration = Duration::from_secs(20);
/// A disk whose storage answers answers within that, on a machine that does other things, too.
const SOON: Duration = Duration::from_secs(2);
/// For what a busy machine adds.
const BUSY: Duration = Duration::from_secs(5);

/// Two disks of one process with one queue thread: `far`, whose image is the export, and `near`.
struct Two {
    storage: NbdStorage,
    place: Place,
    daemon: Daemon,
}

impl Two {
    fn start() -> Two {
        let storage = NbdStorage::new(vec![5; 1 << 20]);
        let place = Place::new("qcow2");
        let far = format!("--disk=image={},format=raw,reconnect=1s,export-name=far", storage.uri());
        let near = format!("--disk=image={},format=qcow2,export-name=near", text(&place.image));
        let words = [&far, &near, "--nbd", text(&place.socket), "--threads", "1"];
        let daemon = Daemon::of(&mut serve_command(&[&words[..], &["--sandbox", "on"]].concat()));
        Two { storage, place, daemon }
    }

    fn client(&self, name: &str) -> NbdClient {
        NbdClient::connect(&self.place.socket, name)
    }

    /// A client of `far` with a read in flight, which the server has not answered.
    fn stuck(&self, silence: Silence) -> NbdClient {
        let mut client = self.client("far");
        client.write(0, &[7; BLOCK]).expect("a server");
        self.storage.fall_silent(silence);
        if silence != Silence::Reply {
            self.storage.cut();
        }
        client.ask(READ, 0, 4096, &[]).expect("a server");
        client
    }

    /// `near` is served as ever, and commands about both disks are answered.
    fn assert_others_go_on(&self, time: Duration) {
        let mut client = self.client("near");
        let begun = Instant::now();
        let mut count = 0;
        while begun.elapsed() < time {
            let asked = Instant::now();
            client.write(count % 64 * BLOCK as u64, &[9; BLOCK]).expect("a server");
            assert!(asked.elapsed() < patient(SOON), "a write took {:?}", asked.elapsed());
            count += 1;
        }
        for name in ["near", "far"] {
            let asked = Instant::now();
            ctl(Path::new(&format!("{}/{name}", text(&self.place.socket))), &["stats"]).ok();
            assert!(asked.elapsed() < patient(SOON + BUSY), "it took {:?}", asked.elapsed());
        }
    }

    /// Stops the process. Gives what it said, and how long it took.
    fn stop(self) -> (Finished, Duration) {
        let begun = Instant::now();
        self.daemon.process.signal(Signal::TERM);
        let finished = self.daemon.process.finish(LIMIT);
        let took = begun.elapsed();
        assert!(!self.place.socket.exists(), "{}", finished.output());
        assert!(!finished.output().contains("panicked"), "{}", finished.output());
        // The other disk was flushed and closed.
        images::assert_clean(&self.place.image);
        images::qemu_io(&self.place.image, "qcow2", &["read -P 9 0 4k"]);
        (finished, took)
    }
}

#[test]
fn a_server_that_is_silent_in_the_handshake_fails_its_requests_in_time_and_no_others() {
    for silence in [Silence::Greeting, Silence::Handshake] {
        let two = Two::start();
        let mut client = two.stuck(silence);
        let begun = Instant::now();
        two.assert_others_go_on(RECONNECT);
        let (_, error) = client.answer().expect("an answer");
        let limit = patient(RECONNECT + CONNECTING + BUSY);
        assert!(error != 0 && begun.elapsed() < limit, "{silence:?}: {:?}", begun.elapsed());
        // It comes back, and so does the disk.
        two.storage.go_on();
        let is_back = || {
            let cookie = client.ask(WRITE, 0, 4096, &[6; BLOCK]).expect("a server");
            (client.answer().expect("an answer") == (cookie, 0)).then_some(())
        };
        assert!(until(LIMIT, is_back).is_some(), "{silence:?}");
        assert_eq!(two.storage.bytes()[..BLOCK], [6; BLOCK]);
        drop(client);
        let (finished, took) = two.stop();
        assert!(took < patient(STOP), "{silence:?}: {took:?}");
        assert_eq!(finished.code(), Some(0), "{silence:?}: {}", finished.output());
    }
}

#[test]
fn a_stop_waits_for_no_server_that_is_silent_for_longer_than_it_says() {
    for silence in [Silence::Greeting, Silence::Reply] {
        let two = Two::start();
        let client = two.stuck(silence);
        two.assert_others_go_on(Duration::from_secs(1));
        let (finished, took) = two.stop();
        assert!(took < patient(STOP + BUSY), "{silence:?}: {took:?}: {}", finished.output());
        // What was written last may not be on stable storage.
        assert_eq!(finished.code(), Some(12), "{silence:?}: {}", finished.output());
        drop(client);
    }
}

#[test]
fn a_server_that_does_not_let_its_client_go_keeps_no_process() {
    let two = Two::start();
    let mut client = two.client("far");
    client.write(0, &[7; BLOCK]).expect("a server");
    client.ask(FLUSH, 0, 0, &[]).expect("a server");
    assert_eq!(client.answer().expect("an answer").1, 0);
    two.storage.fall_silent(Silence::Disconnect);
    two.assert_others_go_on(Duration::from_millis(200));
    drop(client);
    assert_eq!(two.storage.durable()[..BLOCK], [7; BLOCK]);
    let (finished, took) = two.stop();
    assert!(took < patient(BUSY), "{took:?}: {}", finished.output());
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}
