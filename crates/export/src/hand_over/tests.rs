use super::*;

#[test]
fn a_thread_that_gets_no_answer_gives_up_and_the_export_goes_on() {
    let mut sent = None;
    let limit = Duration::from_millis(5);
    let error = ask_within::<()>(|request| sent = Some(request), limit, STANDING);
    assert_eq!(error.expect_err("no answer").kind(), ErrorKind::Refused);
    let request = sent.expect("it was sent");
    assert!(!request.is_awaited());
    assert!(!request.offer(Ok(())));
}

#[test]
fn a_request_that_is_dropped_says_that_the_export_has_ended() {
    let error = ask_hand_over::<()>(drop).expect_err("it has ended");
    assert_eq!(error.kind(), ErrorKind::Halted);
}

/// What the thread that asked does with an export that stands still, and whether the successor has
/// it then.
fn verdict(act: impl FnOnce(HandedOver)) -> bool {
    let mut control = None;
    let (state, still) = ask_hand_over(|request: HandOverRequest<u8>| {
        control = Some(std::thread::spawn(move || {
            assert!(request.is_awaited() && request.stands());
            request.offer(Ok(7))
        }));
    })
    .expect("an answer");
    assert_eq!(state, 7);
    act(still);
    control.expect("it was sent").join().expect("no panic")
}

#[test]
fn the_export_ends_after_a_commit_only() {
    assert!(verdict(|still| assert!(still.commit())));
    assert!(!verdict(drop));
}

#[test]
fn a_refusal_is_the_answer() {
    let refuse = |request: HandOverRequest<()>| {
        request.refuse(Error::new(ErrorKind::Unsupported, "never"));
    };
    assert_eq!(ask_hand_over(refuse).expect_err("refused").kind(), ErrorKind::Unsupported);
}
