#include <photon/thread/thread.h>
#include <photon/fs/localfs.h>
#include <photon/common/alog.h>
#include <photon/common/uuid.h>
#include "src/overlaybd/lsmt/file.h"
#include "src/overlaybd/lsmt/index.h"
#include "src/overlaybd/zfile/zfile.h"
#include "src/overlaybd/zfile/compressor.h"
#include <fcntl.h>
#include <unistd.h>
#include <vector>
#include <string>
using namespace photon::fs;
int main(int argc,char**argv){
  log_output_level=ALOG_ERROR; photon::vcpu_init();
  std::string cmd=argv[1];
  auto op=[&](const char*p,int fl){ auto f=open_localfile_adaptor(p,fl,0644,0); if(!f){perror(p);exit(1);} return f; };
  auto dump=[&](IFile*f){ struct stat st; f->fstat(&st); std::vector<char>b(1<<20);
    for(off_t o=0;o<st.st_size;o+=b.size()){ size_t n=std::min<off_t>(b.size(),st.st_size-o); if(f->pread(b.data(),n,o)!=(ssize_t)n){fprintf(stderr,"read failed\n");return 1;} if(::write(1,b.data(),n)<0)return 1; } return 0; };
  if(cmd=="zcompress"){ // src out algo block verify overwrite
    ZFile::CompressOptions o(atoi(argv[4]),atoi(argv[5]),atoi(argv[6])); ZFile::CompressArgs a(o,nullptr,nullptr,atoi(argv[7]));
    return ZFile::zfile_compress(op(argv[2],O_RDONLY),op(argv[3],O_RDWR|O_CREAT|O_TRUNC),&a);
  }
  if(cmd=="zbuild"){ // through the builder with odd write sizes
    ZFile::CompressOptions o(atoi(argv[4]),atoi(argv[5]),atoi(argv[6])); ZFile::CompressArgs a(o,nullptr,nullptr,atoi(argv[7]));
    auto b=ZFile::new_zfile_builder(op(argv[3],O_RDWR|O_CREAT|O_TRUNC),&a,false); auto s=op(argv[2],O_RDONLY); std::vector<char>v(70000); ssize_t n;
    while((n=s->read(v.data(),v.size()))>0) if(b->write(v.data(),n)!=n) return 1;
    return b->close();
  }
  if(cmd=="zread"){ auto f=ZFile::zfile_open_ro(op(argv[2],O_RDONLY),true,false); if(!f){fprintf(stderr,"open failed\n");return 1;} return dump(f); }
  if(cmd=="zcheck") return ZFile::zfile_validation_check(op(argv[2],O_RDONLY));
  if(cmd=="zstack"){ std::vector<IFile*> v; for(int i=2;i<argc;i++){ auto f=op(argv[i],O_RDONLY); v.push_back(ZFile::is_zfile(f)==1?ZFile::zfile_open_ro(f,true,false):f);} auto f=LSMT::open_files_ro(v.data(),v.size(),false); if(!f){fprintf(stderr,"open failed\n");return 1;} return dump(f); }
  return 2;
}
