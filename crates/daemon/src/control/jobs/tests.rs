use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Events, OnError, Progress, Tries};
use ringdisk_ring::{Config, Errno, Ring, Runtime};
use serde_json::{Map, Value, json};

use super::description::WorkWords;
use super::job::NewJob;
use super::run::{Early, Steps, run};
use super::*;
use crate::control::protocol::jobs::{JobCommand, Named, NewSpeed, Terms, check_name};
use crate::failure::{Exit, Failure};
use crate::job_text as text;

fn new(name: Option<&str>, holds: &[&str]) -> NewJob {
    NewJob {
        name: name.map(str::to_owned),
        before: None,
        kind: Kind::Commit,
        what: String::from("a into b"),
        claims: Claims {
            writes: holds.iter().map(|&name| name.to_owned()).collect(),
            ..Claims::default()
        },
        holds: holds.iter().map(|&name| name.to_owned()).collect(),
        progress: Arc::new(Progress::new()),
        mirror: None,
    }
}

fn done() -> Result<Value, Failure> {
    Ok(json!({}))
}

/// Runs a task on a ring of its own.
fn on_ring<T>(task: impl AsyncFnOnce(Ring) -> T) -> T {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(task(ring))
}

fn states(events: &Events) -> Vec<String> {
    let all = told(events);
    all.into_iter().map(|(state, _)| state).collect()
}

/// State and reason of each event; no reason is an empty one.
fn told(events: &Events) -> Vec<(String, String)> {
    let all = events.read(0, usize::MAX).events;
    let fields = all.iter().map(|event| {
        let field = |name| event.fields.iter().find(|(known, _)| *known == name);
        ["state", "why"].map(|name| field(name).map_or_else(String::new, |it| it.1.clone()))
    });
    fields.map(|[state, why]| (state, why)).collect()
}

#[test]
fn names_are_made_or_given_and_unique() {
    let jobs = Jobs::default();
    let first = jobs.begin(new(None, &["a"])).expect("a job");
    let second = jobs.begin(new(Some("mine"), &["b"])).expect("another");
    assert_eq!((first.id(), second.id()), ("commit-1", "mine"));
    assert_eq!(jobs.begin(new(Some("mine"), &["c"])).expect_err("taken").exit, Exit::Usage);
    // A name that a user took is skipped.
    jobs.begin(new(Some("commit-2"), &["c"])).expect("a third");
    assert_eq!(jobs.begin(new(None, &["d"])).expect("a fourth").id(), "commit-3");
    for bad in ["", "-x", "a b", "a/b", "\u{1b}", &"x".repeat(65)] {
        assert!(check_name(bad).is_err(), "{bad:?}");
        assert!(jobs.begin(new(Some(bad), &["e"])).is_err(), "{bad:?}");
    }
    let none = jobs.find("nothing").expect_err("no such job");
    assert!(none.hint_text().is_some_and(|hint| hint.contains("mine")), "{none:?}");
}

#[test]
fn two_jobs_on_one_image_are_refused_in_the_name_of_the_first() {
    let jobs = Jobs::default();
    let first = jobs.begin(new(None, &["a", "b"])).expect("a job");
    let refused = jobs.begin(new(None, &["b", "c"])).expect_err("b is held");
    assert_eq!(refused.exit, Exit::Locked);
    let text = refused.message();
    assert!(text.contains("'commit-1'") && text.contains("holds the image b"), "{text}");
    assert!(jobs.check_free().is_err(), "the chain is being changed");
    first.conclude(&done());
    jobs.check_free().expect("it has ended");
    jobs.begin(new(None, &["b", "c"])).expect("b is free");
}

#[test]
fn the_last_jobs_that_ended_stay_and_running_ones_always() {
    let jobs = Jobs::default();
    let running = jobs.begin(new(Some("running"), &["held"])).expect("a job");
    for _ in 0..KEPT_MAX + 4 {
        jobs.begin(new(None, &["a"])).expect("a job").conclude(&done());
    }
    let _last = jobs.begin(new(None, &["a"])).expect("a job");
    let all = jobs.all();
    assert_eq!(all.len(), KEPT_MAX + 2);
    assert_eq!((all[0].id(), all[1].id()), (running.id(), "commit-5"));
    jobs.end();
    assert_eq!(running.state(), State::Aborting);
    assert_eq!(jobs.begin(new(None, &["z"])).expect_err("the disk ends").exit, Exit::Halted);
}

/// Work that is done once.
struct Once<W>(Option<W>);

impl<W: Future<Output = Result<Value, Failure>>> Steps for Once<W> {
    async fn run(&mut self) -> Result<Value, Early> {
        self.0.take().expect("once").await.map_err(Early::Failed)
    }

    async fn describe(&mut self) -> Result<HandedJob, String> {
        Err(String::from("it is not handed over"))
    }

    async fn take_back(&mut self) -> Result<(), Failure> {
        Err(Failure::new(Exit::General, "it is not taken back"))
    }
}

/// Copies until it is stopped.
struct Copies(Arc<Job>, Ring);

impl Steps for Copies {
    async fn run(&mut self) -> Result<Value, Early> {
        self.0.progress().set_total(Bytes(10));
        while self.0.progress().pace(&self.1, Bytes::ZERO).await.is_ok() {
            self.1.sleep(Duration::from_millis(1)).await;
        }
        let stops = self.0.progress().is_suspended() && !self.0.progress().is_cancelled();
        let stopped = Early::Failed(Failure::new(Exit::General, "stopped"));
        Err(if stops { Early::Suspended } else { stopped })
    }

    async fn describe(&mut self) -> Result<HandedJob, String> {
        let words = self.0.words(WorkWords::Stream { base: None }, vec![None]);
        Ok(HandedJob { words, descriptors: Vec::new() })
    }

    async fn take_back(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

#[test]
fn a_job_stands_still_for_a_hand_over_and_goes_on_where_that_ends() {
    for is_paused in [false, true] {
        let (jobs, events) = (Arc::new(Jobs::default()), Events::default());
        let job = jobs.begin(new(None, &["a"])).expect("a job");
        job.progress().set_speed(7 << 20);
        if is_paused {
            job.progress().pause();
        }
        let all = Arc::clone(&jobs);
        let hands_over = std::thread::spawn(move || {
            for _ in 0..2 {
                let moving = all.begin_move().expect("nothing is to come");
                assert_eq!(moving.progresses().len(), 1);
                assert!(all.begin(new(None, &["b"])).is_err(), "none is begun meanwhile");
                let handed = moving.stand_still().expect("it stands still");
                let words = &handed[0].words;
                assert_eq!((handed.len(), words.id.as_str()), (1, "commit-1"));
                assert_eq!((words.speed, words.paused), (7 << 20, is_paused));
            }
            let moving = all.begin_move().expect("nothing is to come");
            moving.stand_still().expect("it stands still");
            moving.have_moved(77);
        });
        let told = on_ring(async |ring| {
            run(&job, &events, &ring, Copies(Arc::clone(&job), ring.clone())).await
        });
        hands_over.join().expect("handed over");
        let told = told.expect("it has moved");
        assert_eq!((&told["state"], &told["process"]), (&json!("moved"), &json!(77)));
        assert_eq!(job.state(), State::Moved);
        assert_eq!(states(&events).last().map(String::as_str), Some("moved"));
        assert!(jobs.begin(new(None, &["b"])).is_err());
    }
}

/// It is not handed over as one that was stopped: the next process hears how it has ended.
#[test]
fn a_job_that_fails_while_a_hand_over_begins_has_failed() {
    let (jobs, events) = (Jobs::default(), Events::default());
    let job = jobs.begin(new(None, &["a"])).expect("a job");
    let moving = jobs.begin_move().expect("nothing is to come");
    let suspended = Arc::clone(job.progress());
    let told = on_ring(async |ring| {
        let fails = async move {
            suspended.suspend();
            Err(Failure::new(Exit::General, "its target has failed"))
        };
        run(&job, &events, &ring, Once(Some(fails))).await
    });
    let failure = told.expect_err("it has failed");
    let told = failure.message();
    assert!(told.contains("its target has failed"), "{told}");
    let handed = moving.stand_still().expect("nothing is in the way");
    assert_eq!((job.state(), handed.len()), (State::Concluded, 1));
    let WorkWords::Ended(ended) = &handed[0].words.work else { panic!("{handed:?}") };
    assert!(ended.why.as_ref().is_some_and(|why| why.contains("has failed")), "{handed:?}");
}

#[test]
fn a_command_waits_for_the_end_of_a_hand_over_that_is_given_up() {
    let jobs = Arc::new(Jobs::default());
    let job = jobs.begin(new(None, &["a"])).expect("a job");
    on_ring(async |ring| {
        let moving = jobs.begin_move().expect("nothing is to come");
        let (all, inner, answer) = (Arc::clone(&jobs), ring.clone(), Rc::new(Cell::new(None)));
        let slot = Rc::clone(&answer);
        let command = JobCommand::Cancel(Named { id: job.id().to_owned() });
        ring.spawn(async move {
            let told = all.execute(&inner, &command, "", &Arc::default()).await;
            slot.set(Some(told.map(drop)));
        });
        ring.sleep(Duration::from_millis(50)).await;
        assert!(answer.take().is_none(), "it waits");
        assert!(!job.progress().is_cancelled());
        drop(moving);
        loop {
            if let Some(told) = answer.take() {
                told.expect("the job is here");
                break;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
        assert!(job.progress().is_cancelled());
    });
}

#[test]
fn each_state_of_a_job_is_an_event() {
    let (jobs, events) = (Jobs::default(), Events::default());
    let job = jobs.begin(new(None, &["a"])).expect("a job");
    let progress = Arc::clone(job.progress());
    progress.set_on_error(OnError::StopWhenFull);
    let result = on_ring(async |ring| {
        let own = ring.clone();
        let other = Arc::clone(&progress);
        let work = async move {
            other.set_total(Bytes(100));
            other.pace(&own, Bytes(50)).await.expect("it goes on");
            other.add_done(Bytes(50));
            let mut tries = Tries::default();
            other.failed(&own, &mut tries, Errno::NOSPC).await.expect("resumed after the error");
            other.written(&mut tries);
            other.add_done(Bytes(10));
            while other.pace(&own, Bytes::ZERO).await.is_ok() {
                own.sleep(Duration::from_millis(1)).await;
            }
            Err(Failure::new(Exit::General, "cancelled"))
        };
        // The other end: looks at the states, and acts on each.
        let (seen, inner) = (Rc::new(Cell::new(false)), ring.clone());
        let (over, watched) = (Rc::clone(&seen), Arc::clone(&job));
        ring.spawn(async move {
            while watched.state() != State::Paused {
                inner.sleep(Duration::from_millis(1)).await;
            }
            let why = watched.why().unwrap_or_default();
            assert_eq!(why, "waiting for space on the target: No space left on device");
            watched.progress().resume();
            while watched.progress().done() < Bytes(60) {
                inner.sleep(Duration::from_millis(1)).await;
            }
            watched.progress().cancel();
            over.set(true);
        });
        let result = run(&job, &events, &ring, Once(Some(work))).await;
        assert!(seen.get());
        result
    });
    assert!(result.is_err());
    assert_eq!(job.state(), State::Concluded);
    assert_eq!(job.why().as_deref(), Some("cancelled"));
    let (told, told_all) = (states(&events), told(&events));
    assert_eq!(told.first().map(String::as_str), Some("created"));
    assert_eq!(told.last().map(String::as_str), Some("concluded"));
    let paused = told.iter().position(|state| state == "paused").expect("it waited");
    assert_eq!(told[paused + 1..], ["running", "aborting", "concluded"], "{told:?}");
    let [(_, waits), (_, goes_on), ..] = &told_all[paused..] else { panic!("{told_all:?}") };
    assert!(waits.starts_with("waiting for space on the target"), "{waits}");
    assert_eq!(goes_on, "the target has space again");
    let list = job.to_json();
    assert_eq!(
        (&list["done"], &list["total"], &list["exit"]),
        (&json!(60), &json!(100), &json!(1))
    );
}

#[test]
fn commands_act_on_the_job_that_they_name_and_a_wait_ends_with_it() {
    let (jobs, events) = (Rc::new(Jobs::default()), Arc::new(Events::default()));
    let job = jobs.begin(new(None, &["a"])).expect("a job");
    job.progress().set_total(Bytes(10));
    let named = || Named { id: String::from("commit-1") };
    on_ring(async |ring| {
        let client = Arc::new(Progress::new());
        let ask = async |command| jobs.execute(&ring, &command, "/srv/disk", &client).await;
        let paused = ask(JobCommand::Pause(named())).await.expect("paused");
        assert_eq!(paused["state"], "paused");
        let limit = NewSpeed { id: named().id, speed: 1 << 20 };
        let limited = ask(JobCommand::Limit(limit)).await.expect("limited");
        assert_eq!(limited["speed"], 1 << 20);
        assert_eq!(ask(JobCommand::Resume(named())).await.expect("resumed")["state"], "running");
        assert!(ask(JobCommand::Resume(named())).await.is_err(), "it is not paused");
        let wrong = JobCommand::Cancel(Named { id: String::from("other") });
        assert_eq!(ask(wrong).await.expect_err("no such job").exit, Exit::Usage);
        // A client that leaves stops waiting; the job goes on.
        let leaving = Arc::new(Progress::new());
        leaving.cancel();
        assert!(jobs.execute(&ring, &JobCommand::Wait(named()), "", &leaving).await.is_err());
        let (own, told, running) = (ring.clone(), Arc::clone(&events), Arc::clone(&job));
        ring.spawn(async move {
            let work = async {
                own.sleep(Duration::from_millis(20)).await;
                Ok(json!({ "chain": ["b"] }))
            };
            let inner = own.clone();
            let _ = run(&running, &told, &inner, Once(Some(work))).await;
        });
        let ended = ask(JobCommand::Wait(named())).await.expect("done");
        assert_eq!(
            (&ended["state"], &ended["result"]["chain"][0]),
            (&json!("concluded"), &json!("b"))
        );
        assert!(ask(JobCommand::Pause(named())).await.is_err(), "it has ended");
        let list = ask(JobCommand::List).await.expect("a list");
        assert_eq!((&list["target"], &list["jobs"][0]["exit"]), (&json!("/srv/disk"), &json!(0)));
    });
}

#[test]
fn commands_and_terms_are_read_or_refused() {
    let read = |name: &str, arguments: Value| {
        let arguments = arguments.as_object().cloned().unwrap_or_else(Map::new);
        JobCommand::read(name, &arguments)
    };
    for command in [
        JobCommand::List,
        JobCommand::Pause(Named { id: String::from("x") }),
        JobCommand::Resume(Named { id: String::from("x") }),
        JobCommand::Limit(NewSpeed { id: String::from("x"), speed: u64::MAX }),
        JobCommand::Cancel(Named { id: String::from("x") }),
        JobCommand::Wait(Named { id: String::from("x") }),
    ] {
        let (name, arguments) = command.parts();
        assert_eq!(read(name, arguments), Some(Ok(command)));
        assert!(JobCommand::NAMES.contains(name), "{name}");
    }
    assert!(read("job-list", json!({ "id": "x" })).is_some_and(|read| read.is_err()));
    assert!(read("job-limit", json!({ "id": "x", "speed": -1 })).is_some_and(|read| read.is_err()));
    assert!(read("job-pause", json!({})).is_some_and(|read| read.is_err()));
    assert_eq!(read("job-fly", json!({})), None);
    let in_background = Terms { background: true, ..Terms::default() };
    assert_eq!(in_background.on_error(), Ok(OnError::StopWhenFull));
    assert_eq!(Terms::default().on_error(), Ok(OnError::Report));
    let wrong = Terms { on_error: Some(String::from("explode")), ..Terms::default() };
    assert!(wrong.on_error().is_err());
}

#[test]
fn a_line_shows_the_way_and_controls_no_terminal() {
    let job = json!({
        "id": "commit-1", "state": "running", "done": 1 << 30, "total": 2_u64 << 30,
        "rate": 100 << 20, "estimate-seconds": 10, "speed": 200 << 20, "what": "a\u{1b}[2J into b",
    });
    let line = text::line(&job);
    let expected = "commit-1  running  [##########----------]  50 % of 2 GiB, 100 MiB/s, 10s left \
                    (limit 200 MiB/s)";
    assert!(line.starts_with(expected) && !line.contains('\u{1b}'), "{line}");
    for odd in [json!(null), json!({}), json!({ "done": u64::MAX, "total": 1 })] {
        assert!(!text::line(&odd).contains('\u{1b}'));
    }
    let failed = json!({ "id": "x", "state": "concluded", "exit": 12, "why": "no space" });
    assert_eq!(text::line(&failed), "x  failed: no space  ");
    assert_eq!(text::lists(&[json!({ "target": "/a", "jobs": [] })]), "");
    let text = text::lists(&[json!({ "target": "/a", "jobs": [failed] })]);
    assert_eq!(text, "/a\n  x  failed: no space  \n");
}

/// A job of the process before, as it comes.
fn handed(id: &str, token: &str) -> HandedJob {
    let mut words = JobWords::new(id, WorkWords::Stream { base: None }, vec![None]);
    (words.token, words.speed, words.paused) = (token.to_owned(), 7 << 20, true);
    HandedJob { words, descriptors: Vec::new() }
}

#[test]
fn new_jobs_and_commands_come_after_those_of_the_process_before() {
    let jobs = Jobs::default();
    jobs.are_to_come(&[handed("commit-1", "0a"), handed("mine", "")]);
    let refused = jobs.begin(new(None, &["a"])).expect_err("it would take a name");
    assert_eq!(refused.exit, Exit::Locked);
    assert_eq!(jobs.check_free().expect_err("the chain is about to be changed").exit, Exit::Locked);
    assert!(jobs.check_came().is_err() && jobs.is_coming("mine") && !jobs.is_coming("other"));
    let listed = jobs.listed();
    assert_eq!((listed[0].id(), listed[0].token(), listed.len()), ("commit-1", "0a", 2));
    assert_eq!(listed[0].to_json()["speed"], 7 << 20);
    assert!(jobs.all().is_empty());
    let before = |token: &str| Some(token.to_owned());
    let first = NewJob { before: before("0a"), ..new(Some("commit-1"), &["a"]) };
    let first = jobs.begin(first).expect("it goes on");
    assert_eq!((first.token(), jobs.listed().len()), ("0a", 2));
    assert!(jobs.is_coming("mine") && !jobs.is_coming("commit-1"));
    let second = NewJob { before: before(""), ..new(Some("mine"), &["b"]) };
    let second = jobs.begin(second).expect("it goes on");
    assert_eq!(second.token().len(), 16, "the process before knew none");
    jobs.have_come();
    assert!(!jobs.are_coming());
    let third = jobs.begin(new(None, &["c"])).expect("a new one");
    assert_eq!(third.id(), "commit-2");
    assert_ne!(third.token(), second.token());
    assert_eq!(third.words(WorkWords::Stream { base: None }, Vec::new()).token, third.token());
}

/// A second hand-over that begins before the jobs of the first one have.
#[test]
fn jobs_that_are_still_coming_are_handed_over_once_they_are_there() {
    let jobs = Jobs::default();
    jobs.are_to_come(&[handed("mine", "0a")]);
    let words = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            let come = NewJob { before: Some(String::from("0a")), ..new(Some("mine"), &["a"]) };
            let job = jobs.begin(come).expect("it goes on");
            jobs.have_come();
            while !job.progress().is_suspended() {
                std::thread::sleep(Duration::from_millis(1));
            }
            job.stand_still(Ok(handed("mine", "0a")));
        });
        let moving = jobs.begin_move().expect("it waits for them");
        let handed = moving.stand_still().expect("they stand still");
        moving.have_moved(1);
        handed
    });
    assert_eq!(words.iter().map(HandedJob::id).collect::<Vec<_>>(), ["mine"]);
    // Not for ever.
    let jobs = Jobs::default();
    jobs.are_to_come(&[handed("mine", "0a")]);
    let failure = jobs.begin_move().expect_err("they do not come");
    assert_eq!(failure.exit, Exit::Locked);
    assert!(jobs.check_stays().is_ok(), "the disk stays");
}

#[test]
fn a_wait_lasts_until_the_job_has_come() {
    let jobs = Arc::new(Jobs::default());
    jobs.are_to_come(&[handed("mine", "0a")]);
    on_ring(async |ring| {
        let (all, inner, answer) = (Arc::clone(&jobs), ring.clone(), Rc::new(Cell::new(None)));
        let slot = Rc::clone(&answer);
        let command = JobCommand::Wait(Named { id: String::from("mine") });
        ring.spawn(async move {
            let told = all.execute(&inner, &command, "", &Arc::default()).await;
            slot.set(Some(told));
        });
        ring.sleep(Duration::from_millis(20)).await;
        assert!(answer.take().is_none(), "it waits");
        let come = NewJob { before: Some(String::from("0a")), ..new(Some("mine"), &["a"]) };
        let job = jobs.begin(come).expect("it goes on");
        jobs.have_come();
        job.conclude(&done());
        loop {
            if let Some(told) = answer.take() {
                assert_eq!(told.expect("its end")["token"], "0a");
                break;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
    });
}
