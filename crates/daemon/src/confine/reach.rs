//! Where the command line of this process lets images lead.
//!
//! A process that goes on with the disk of another one is told names and files by that one, before
//! it is confined itself. If that process was taken over, it says what it likes: `/etc/shadow` as
//! the image on top, the directory `/etc` as that of an image, a descriptor of a file below `/proc`
//! as an image. So what is said counts only where the own command line leads to it, too.
//!
//! Promises: a name is judged by where it leads at that moment, links followed. Who says it can
//! make no links inside its sandbox.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files and directories, as they are called without links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Reach {
    /// * `images`: those of the command line; where they lie, overlays and backing files may lie.
    /// * `more`: files and directories of `--allow-path`.
    pub fn of<'a>(images: impl IntoIterator<Item = &'a Path>, more: &[PathBuf]) -> Reach {
        let mut reach = Reach::default();
        for image in images {
            let beside = fs::canonicalize(
                image.parent().filter(|it| *it != Path::new("")).unwrap_or(Path::new(".")),
            );
            let real = fs::canonicalize(image).ok();
            let directories =
                [beside.ok(), real.as_deref().and_then(Path::parent).map(Path::to_owned)];
            reach
                .directories
                .extend(directories.into_iter().flatten().filter(|it| !is_whole_system(it)));
            reach.files.extend(real);
        }
        for path in more.iter().filter_map(|path| fs::canonicalize(path).ok()) {
            if path.is_dir() { reach.directories.push(path) } else { reach.files.push(path) }
        }
        reach
    }

    /// Whether a name leads to one of the files, or to something in one of the directories, at any
    /// depth.
    pub fn has(&self, path: &Path) -> bool {
        let Ok(real) = fs::canonicalize(path) else { return false };
        self.files.contains(&real) || self.directories.iter().any(|it| real.starts_with(it))
    }

    /// Whether a file that is open has a name that [`Reach::has`].
    ///
    /// * `open`: its entry in `/proc/self/fd`.
    pub fn has_open(&self, open: &Path) -> bool {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        // The kernel says how the file is called now. One without a name has that of another file,
        // or of none.
        let Ok(name) = fs::read_link(open) else { return false };
        let named = fs::symlink_metadata(&name).map(identity).ok();
        named.is_some() && named == fs::metadata(open).map(identity).ok() && self.has(&name)
    }
}

/// Whether a directory is never one of images as a whole.
pub(crate) fn is_whole_system(directory: &Path) -> bool {
    directory == Path::new("/") || directory.starts_with("/dev")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_lies_beside_images_and_where_the_user_says_is_reached() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().canonicalize().expect("exists");
        let path = |name: &str| root.join(name);
        for name in ["images", "images/deep", "links", "allowed", "other"] {
            fs::create_dir(path(name)).expect("mkdir");
        }
        for name in ["images/disk", "images/deep/top", "allowed/top", "other/secret", "other/one"] {
            fs::write(path(name), "").expect("write");
        }
        symlink(path("images/disk"), path("links/disk")).expect("a link");
        symlink(path("other/secret"), path("images/leads-out")).expect("a link");
        fs::write(path("links/beside"), "").expect("write");
        let more = [path("allowed"), path("other/one"), path("gone")];
        let reach = Reach::of([path("links/disk").as_path()], &more);
        for name in [
            "images/disk",
            "links/disk",
            "links/beside",
            "images/deep/top",
            "allowed/top",
            "other/one",
        ] {
            assert!(reach.has(&path(name)), "{name}");
        }
        for name in
            ["other/secret", "images/leads-out", "images/../other/secret", "gone", "images/gone"]
        {
            assert!(!reach.has(&path(name)), "{name}");
        }
        assert!(!Reach::of([Path::new("/dev/null")], &[]).has(Path::new("/dev/zero")));
        assert!(Reach::of([Path::new("/dev/null")], &[]).has(Path::new("/dev/null")));
    }

    #[test]
    fn an_open_file_is_reached_by_the_name_that_it_has_now() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        for name in ["images", "other"] {
            fs::create_dir(path(name)).expect("mkdir");
        }
        for name in ["images/disk", "other/secret"] {
            fs::write(path(name), "").expect("write");
        }
        let reach = Reach::of([path("images/disk").as_path()], &[]);
        let has = |file: &fs::File| {
            reach.has_open(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))
        };
        let open = |path: &Path| fs::File::open(path).expect("open");
        let (disk, secret) = (open(&path("images/disk")), open(&path("other/secret")));
        assert!(has(&disk) && !has(&secret));
        assert!(!has(&open(Path::new("/proc/self/status"))));
        fs::rename(path("images/disk"), path("images/renamed")).expect("rename");
        assert!(has(&disk), "it lies where it may");
        fs::rename(path("images/renamed"), path("other/disk")).expect("rename");
        assert!(!has(&disk), "it does not any more");
        fs::rename(path("other/disk"), path("images/disk")).expect("rename");
        fs::remove_file(path("images/disk")).expect("remove");
        assert!(!has(&disk), "it has no name");
        fs::write(path("images/disk"), "").expect("write");
        assert!(!has(&disk), "another one has it");
    }
}
