use ringdisk_testkit::process::LIMIT;

use super::*;

#[test]
fn a_state_with_many_descriptors_arrives_whole() {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let file = tempfile::tempfile().expect("file");
    let fds = (0..600).map(|_| OwnedFd::from(file.try_clone().expect("copy"))).collect();
    let state = HandOverState { description: "x".repeat(100_000), fds };
    let sender = std::thread::spawn(move || send(&ours, &state));
    let received = receive(&theirs, LIMIT).expect("received").expect("a state");
    assert_eq!((received.description.len(), received.fds.len()), (100_000, 600));
    sender.join().expect("sender").expect("sent");
}

#[test]
fn refusals_and_rubbish_are_told_apart() {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let [why, hint] = ["why", "what to do"].map(String::from);
    let refusals = [
        Refusal::Now(String::from("not now")),
        Refusal::Unlike(String::from("b")),
        Refusal::Never { why, hint },
    ];
    for refusal in refusals {
        send_refusal(&ours, &refusal).expect("sent");
        assert_eq!(receive(&theirs, LIMIT).expect("received").expect_err("refused"), refusal);
    }
    send_view(&ours, &ClientView::default()).expect("sent");
    assert_eq!(receive_view(&theirs).expect("received"), ClientView::default());
    (&ours).write_all(b"\x02\0\0\0no").expect("sent");
    assert!(receive_view(&theirs).is_err());
    (&ours).write_all(&[0xff; 4]).expect("sent");
    assert!(receive_view(&theirs).is_err());
    (&ours).write_all(&[0xff; 8]).expect("sent");
    assert!(receive(&theirs, LIMIT).is_err());
    drop(ours);
    assert!(receive(&theirs, LIMIT).is_err());
}

#[test]
fn a_state_that_comes_byte_for_byte_is_not_waited_for_longer_than_any() {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    let begun = Instant::now();
    let drips = std::thread::spawn(move || {
        // A million bytes of words, one every 10 ms, until nobody listens.
        ours.write_all(&[0x40, 0x42, 0xf, 0, 0, 0, 0, 0]).expect("sent");
        while ours.write_all(b"x").is_ok() && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let error = receive(&theirs, Duration::from_millis(300)).expect_err("too slow");
    assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
    drop(theirs);
    drips.join().expect("no panic");
    assert!(begun.elapsed() < LIMIT);
}
