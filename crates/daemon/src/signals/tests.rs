use std::sync::mpsc;
use std::time::Duration;

use super::*;

#[test]
fn the_mask_of_ignored_signals_is_read() {
    assert_eq!(ignored_mask("Name:\tx\nSigIgn:\t0000000000001001\n"), Some(0x1001));
    assert_eq!(ignored_mask("Name:\tx\n"), None);
}

#[test]
fn what_comes_while_mounting_is_remembered_and_while_serving_is_passed_on() {
    let (send, receive) = mpsc::channel();
    let watcher = Watcher { state: Arc::new(Mutex::new(State::new(Phase::Mounting))) };
    watcher.take(SIGUSR1);
    assert_eq!(watcher.stopped_by(), None);
    watcher.take(SIGINT);
    watcher.take(SIGUSR2);
    let stop = send.clone();
    let actions = Actions {
        stop: Box::new(move |name| stop.send(name).expect("send")),
        print: Box::new(move || send.send("print").expect("send")),
    };
    assert_eq!(watcher.enter(Phase::Serving(actions)), Some("SIGINT"));
    watcher.take(SIGUSR1);
    watcher.take(SIGTERM);
    let wait = Duration::from_secs(1);
    assert_eq!(receive.recv_timeout(wait), Ok("print"), "asked for while mounting");
    assert_eq!(receive.recv_timeout(wait), Ok(AT_ONCE), "asked for while mounting");
    assert_eq!(receive.recv_timeout(wait), Ok("print"));
    assert_eq!(receive.recv_timeout(wait), Ok("SIGTERM"));
    assert_eq!(watcher.enter(Phase::Ending), Some("SIGINT"));
    watcher.take(SIGHUP);
}
